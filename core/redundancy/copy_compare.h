// SPDX-License-Identifier: Apache-2.0
//
// CompareCopies reads the copies of a tensor side by side and says which of them hold equal
// bytes, unit by unit (kCompareUnit in redundancy.h).
//
// Thread safety: pure apart from the blob reader.
// Units: bytes; ranges are elements.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/redundancy/tensor_copies.h"

namespace ckptfs {

// The blobs that hold some bytes; rising.
using Holders = std::vector<uint32_t>;

struct CopyTally {
  uint64_t unique = 0;  // bytes that exactly these hold
  uint64_t stored = 0;  // the same times the copies, of which two may be in one file
};

struct CopyComparison {
  std::map<Holders, CopyTally> held;
  std::map<uint32_t, uint64_t> stored;  // bytes of all copies, by blob
  uint64_t differing = 0;  // bytes of units in which not all copies are equal, all copies together
  void Add(const CopyComparison& other);
};

// Elements that are compared at once, a multiple of a unit, for this many copies.
uint64_t ElementsAtOnce(const CopiedTensor& tensor);

// Compares elements [first, first + count).  REQUIRES: at least one copy; `first` is a multiple of
// ElementsAtOnce.  Refuses more copies than memory is put aside for.  BLOCKS: on reading.
Result<CopyComparison> CompareCopies(const TensorCopies& copies, BlobReader& blobs,
                                     const CopiedTensor& tensor, uint64_t first, uint64_t count);

}  // namespace ckptfs
