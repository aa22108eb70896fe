// SPDX-License-Identifier: Apache-2.0

#include "core/state/state_part.h"

#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

Status CheckBox(const StateBox& box, const Shape& whole, const Shape& local) {
  const size_t rank = whole.size();
  if (box.begin.size() != rank || box.end.size() != rank || box.at.size() != rank ||
      local.size() != rank) {
    return Refuse("a box, its place and the tensor must have the ", rank,
                  " dimensions of the state");
  }
  for (size_t d = 0; d < rank; ++d) {
    if (box.begin[d] > box.end[d] || box.end[d] > whole[d]) {
      return Refuse("box [", box.begin[d], ", ", box.end[d], ") lies beyond the state's ", whole[d],
                    " elements of dimension ", d);
    }
    if (!RangeInside(box.at[d], box.end[d] - box.begin[d], local[d])) {
      return Refuse("a box of ", box.end[d] - box.begin[d], " at ", box.at[d],
                    " lies beyond the tensor's ", local[d], " elements of dimension ", d);
    }
  }
  return {};
}

// True if two boxes share an element of the tensor.
bool ShareElements(const StateBox& a, const StateBox& b) {
  for (size_t d = 0; d < a.at.size(); ++d) {
    const uint64_t a_size = a.end[d] - a.begin[d];
    const uint64_t b_size = b.end[d] - b.begin[d];
    if (a_size == 0 || b_size == 0) return false;
    if (a.at[d] + a_size <= b.at[d] || b.at[d] + b_size <= a.at[d]) return false;
  }
  return true;
}

// How the tensor that a rank holds lies in what is stored.
struct Lying {
  Shape shape;                    // of the rank's tensor
  std::vector<uint64_t> strides;  // of its dimensions, in the stored one
};

Result<Lying> LyingOf(const Shape& stored, const std::vector<uint64_t>& order) {
  CKPT_RETURN_IF_ERROR(ElementCount(stored));
  Lying lying{stored, RowMajorStrides(stored)};
  if (order.empty()) return lying;
  const std::vector<uint64_t> strides = lying.strides;
  std::vector<bool> named(stored.size(), false);
  bool each = order.size() == stored.size();
  for (size_t k = 0; k < order.size() && each; ++k) {
    each = order[k] < stored.size() && !named[order[k]];
    if (!each) break;
    named[order[k]] = true;
    lying.shape[order[k]] = stored[k];
    lying.strides[order[k]] = strides[k];
  }
  if (!each) return Refuse("an order that does not name each dimension once");
  return lying;
}

Result<LocalTensor> LocalOf(const StatePart& part, const Shape& stored,
                            const std::vector<uint64_t>& order) {
  if (part.pieces.size() > kMaxStateBoxes) {
    return Refuse(part.pieces.size(), " boxes; at most ", kMaxStateBoxes, " are understood");
  }
  CKPT_ASSIGN_OR_RETURN(const Lying lying, LyingOf(stored, order));
  const auto& [shape, strides] = lying;
  LocalTensor local{stored, {}};
  for (const StateBox& box : part.pieces) {
    CKPT_RETURN_IF_ERROR(CheckBox(box, part.shape, shape));
    for (const StateBox& other : part.pieces) {
      if (&other == &box) break;
      if (ShareElements(box, other)) return Refuse("two boxes lie on the same elements");
    }
    Piece piece{{}, box.begin, 0, strides, 1.0};
    bool empty = false;
    for (size_t d = 0; d < shape.size(); ++d) {
      piece.shape.push_back(box.end[d] - box.begin[d]);
      empty |= piece.shape.back() == 0;
    }
    for (size_t d = 0; d < shape.size() && !empty; ++d) {
      piece.local_offset += box.at[d] * strides[d];
    }
    local.pieces.push_back(std::move(piece));
  }
  return local;
}

}  // namespace

Result<LocalRange> LocalRangeOf(const StatePart& part, const Shape& stored) {
  CKPT_RETURN_IF_ERROR(ElementCount(part.shape));
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(stored));
  if (part.pieces.empty() && !part.flat && part.order.empty()) {
    return Refuse("it has neither pieces nor a flat range nor an order");
  }
  if (part.flat && !part.order.empty()) return Refuse("it has both a flat range and an order");
  const bool both = !part.pieces.empty() && part.flat;
  if (both != part.local_shape.has_value()) {
    return Refuse(
        "it must have a local shape if, and only if, it has both pieces and a flat "
        "range");
  }
  LocalRange range;
  if (!part.order.empty() && part.pieces.empty()) {
    CKPT_ASSIGN_OR_RETURN(const Lying lying, LyingOf(stored, part.order));
    if (lying.shape != part.shape) {
      return Refuse("a tensor of shape ", ShapeToString(stored), " in that order is not of shape ",
                    ShapeToString(part.shape));
    }
    range.local = {
        stored, {{part.shape, std::vector<uint64_t>(part.shape.size(), 0), 0, lying.strides, 1.0}}};
  } else if (part.pieces.empty()) {
    range.local = WholeTensor(part.shape);
  } else {
    CKPT_ASSIGN_OR_RETURN(range.local,
                          LocalOf(part, both ? *part.local_shape : stored, part.order));
  }
  CKPT_RETURN_IF_ERROR(ValidateLocal(range.local, part.shape));
  CKPT_ASSIGN_OR_RETURN(const uint64_t all, ElementCount(range.local.shape));
  range.end = all;
  if (!part.flat) return range;
  range.begin = (*part.flat)[0];
  range.end = (*part.flat)[1];
  if (range.begin > range.end || range.end > all) {
    return Refuse("flat range [", range.begin, ", ", range.end, ") lies beyond the ", all,
                  " elements of its tensor");
  }
  if (stored.size() != 1 || elements != range.end - range.begin) {
    return Refuse("a tensor of shape ", ShapeToString(stored), " is not one row of the ",
                  range.end - range.begin, " elements of its flat range");
  }
  return range;
}

}  // namespace ckptfs
