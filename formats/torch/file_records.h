// SPDX-License-Identifier: Apache-2.0
//
// The checksums that source files hold of their own bytes: those of a zip's
// records.  Legacy torch files and files of other kinds hold none.
//
// Thread safety: pure but for reading the file.
// Units: bytes.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/record_sums.h"
#include "formats/torch/zip_archive.h"

namespace ckptfs {

// The records of an opened archive.
std::vector<FileRecord> RecordsOfArchive(const ZipArchive& archive);

// A record with bytes and the checksum 0 has none: torch writes so when told to
// (torch.serialization.set_crc32_options, skip_data), and so do our own views.
// An error for a file *.pt that is not a torch file, naming it.
// BLOCKS: on reading the headers.
Result<std::vector<FileRecord>> RecordsOfFile(const std::shared_ptr<const File>& file);

}  // namespace ckptfs
