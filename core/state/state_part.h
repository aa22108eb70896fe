// SPDX-License-Identifier: Apache-2.0
//
// A StatePart says which part of a whole state one rank's tensor is, in the words of a
// rank file (core/state/rank_file.h): boxes of the whole, a flat range of it, or a
// flat range of a tensor that is made of boxes.  LocalRangeOf makes of it what the
// data model calls so, and checks all of it: for writers of such files and for their
// readers.
//
// Thread safety: values and a pure function.
// Units: elements; boxes and ranges are half-open.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/piece.h"

namespace ckptfs {

// A box of the whole state, and the index in the local tensor where it begins; one
// number per dimension each.
struct StateBox {
  std::vector<uint64_t> begin;
  std::vector<uint64_t> end;
  std::vector<uint64_t> at;
};

struct StatePart {
  Shape shape;  // of the whole state
  std::vector<StateBox> pieces;
  // With both: the tensor is elements [begin, end) of a local tensor of this shape,
  // which the pieces are of.
  std::optional<Shape> local_shape;
  // Without pieces: of the whole state.
  std::optional<std::array<uint64_t, 2>> flat;
  // The stored tensor's dimensions are these of the tensor that the rank holds, outermost first
  // (channels_last: 0, 2, 3, 1); empty: as they are.  Without a flat range.  Without pieces: of
  // the whole state.
  std::vector<uint64_t> order = {};
};

// More pieces of one tensor are refused.
inline constexpr size_t kMaxStateBoxes = 1024;

// A stored tensor is elements [begin, end) of this local tensor.
struct LocalRange {
  LocalTensor local;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// `stored`: the shape of the tensor itself.  kInvalid names the rule: a box or range
// that leaves what it is of, boxes that share elements of the tensor, a shape that
// is not theirs, an order that does not name each dimension once.
Result<LocalRange> LocalRangeOf(const StatePart& part, const Shape& stored);

}  // namespace ckptfs
