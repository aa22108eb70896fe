// SPDX-License-Identifier: Apache-2.0
//
// Finds what files share, and which of them keeps what if each byte is there once.
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/redundancy/copy_compare.h"
#include "core/redundancy/redundancy.h"

namespace ckptfs {

// Bytes of a tensor that all of `holders` hold.
struct SharedPart {
  size_t tensor = 0;  // into RedundancyReport::tensors
  Holders holders;    // into RedundancyReport::files, at least two
  uint64_t bytes = 0;
};

// Gives each part to the one of its holders that has the least to keep so far, the largest parts
// first: adds to files[].kept and tensors[].keeps.  The same parts get the same answer.
// REQUIRES: files[].kept has what one file alone holds.
void AssignKeepers(std::vector<SharedPart> parts, RedundancyReport& report);

// The bytes that each two files share, pair by pair in the order of AdaCheck's ring; nothing if
// more than kMostPairedFiles files share something.
std::optional<std::vector<SharedPair>> PairsOf(const std::vector<SharedPart>& parts, size_t files);

}  // namespace ckptfs
