// SPDX-License-Identifier: Apache-2.0
//
// RankTensors is what one rank of a layout holds: its shard of every weight,
// buffer and optimizer state, each with the part of the global tensor it is.
// Ranks that differ only in their data-parallel place hold the same tensors,
// but for which slice of each optimizer state (zero >= 1).
//
// Thread safety: immutable once built.
// Lifetime: holds indexes into the step, no pointers to it.
// Units: elements, bytes where said.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/view/plan.h"
#include "core/view/shown_state.h"

namespace ckptfs {

struct RankTensor {
  std::string key;  // "<name>" or "<kind>/<name>"
  ParameterIndex parameter{};
  AtomIndex atom{};
  DType dtype = DType::kF32;  // as shown
  std::shared_ptr<const LocalTensor> local;
  Shape shape;            // as shown: the local shape, or [slice]
  uint64_t elements = 0;  // of the local tensor
  bool derived = false;   // not stored so by the source: a cast of another atom
  // Flat: one of `degree` slices of so many elements of the row-major local
  // tensor; slices that pass its end are zero there.
  bool flat = false;
  uint64_t slice = 0;
  uint64_t degree = 1;
  bool expert = false;  // its slice is numbered by the expert grid

  // SliceOf is the number of the slice that the rank holds; the range is its [begin, end)
  // without padding.
  // REQUIRES: flat.
  uint64_t SliceOf(const RankCoordinate& rank) const { return expert ? rank.edp : rank.dp; }
  std::pair<uint64_t, uint64_t> RangeOf(const RankCoordinate& rank) const;
  uint64_t ByteLength() const;
  AtomSegment SegmentOf(const RankCoordinate& rank) const;
};

struct RankTensors {
  // Widest dtype first, then by key: every tensor lies aligned in a file.
  std::vector<RankTensor> model;
  std::vector<RankTensor> optimizer;
  // Second names of model tensors: (alias, key).
  std::vector<std::pair<std::string, std::string>> aliases;
  std::vector<std::string> left_out;  // "<kind>/<name>: why"
};

// REQUIRES: CheckLayout and CheckNames succeed for what is shown.  The data-parallel place of
// `rank` plays no part.
Result<RankTensors> BuildRankTensors(const ShownState& shown, const RankCoordinate& rank);

}  // namespace ckptfs
