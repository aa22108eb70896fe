// SPDX-License-Identifier: Apache-2.0
//
// ArchivePlan lays out a `.pt` zip whose every offset is known before a tensor
// byte is read: data.pkl, then one stored record per storage on a 64-byte
// boundary, CRC 0 (as torch.serialization.set_crc32_options(False) writes;
// torch.load never checks), no .format_version record (so that torch does not
// compute offsets by itself).  zip64 where sizes or offsets need it.
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/view/plan.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

// The payload of record data/<key>, key = position in the vector.
struct ArchiveStorage {
  uint64_t length = 0;
  SegmentBody body;  // AtomSegment, BlobSegment, LiteralSegment or ZeroSegment of that length
  // Several segments when one is not enough (then body is unused).
  std::vector<std::pair<uint64_t, SegmentBody>> parts;
};

// Total file size for a pickle of `pickle_bytes` and storages of these lengths.
uint64_t ArchiveSize(std::string_view folder, uint64_t pickle_bytes,
                     const std::vector<uint64_t>& storage_lengths);

// An archive from the plan's end on, whose offsets count from there, as torch
// reads it from a slice of a file.  `folder` is the name of the zip's top folder.
// On an error nothing is appended.
// REQUIRES: TensorNode::storage_key of every tensor in `tree` is the decimal
// position of its storage.
Status AppendArchive(PlanBuilder& plan, std::string_view folder, const PickleTree& tree,
                     std::vector<ArchiveStorage> storages);

// A file that is an archive.
Result<Plan> ArchivePlan(std::string_view folder, const PickleTree& tree,
                         std::vector<ArchiveStorage> storages);

}  // namespace ckptfs
