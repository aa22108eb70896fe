// SPDX-License-Identifier: Apache-2.0
//
// The container that torch.save wrote before 1.6, and writes with
// _use_new_zipfile_serialization=False (torch/serialization.py _legacy_save):
//
//   file    = pickle(0x1950a86a20f9469cfc6c) | pickle(1001) | pickle(system info dict) |
//             pickle(object) | pickle(list of storage keys) | storage*   in the list's order
//   storage = i64 elements (little-endian) | elements * width bytes
//
// A storage's element width is that of its class in the object's persistent
// ids.  Files of big-endian machines and the tar form of torch < 0.1.10 are refused by name.
//
// Thread safety: pure.
// Units: bytes.

#pragma once

#include "core/base/result.h"
#include "core/io/file_range.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {

// kInvalid names the rule.  BLOCKS: on reading the pickles.
Result<TorchFile> OpenLegacyArchive(const FileRange& file);

}  // namespace ckptfs
