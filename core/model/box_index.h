// SPDX-License-Identifier: Apache-2.0
//
// BoxIndex finds the source pieces of a gather that a box of the atom may meet without
// looking at all of them: a weight that 1,024 ranks hold as a grid of boxes is read some
// rows at a time.  It is a tree of bounding boxes over the pieces, halved along the
// dimension in which most of them lie beside each other, and costs 16 bytes a piece.
//
//   leaf    kLeaf entries, the last one fewer
//   node    the box around its leaves; nodes in preorder, the left child has the larger half
//
// It only leaves out pieces, never says what one is: an index of other locals finds too
// few of them, which a reader sees as a hole, and never wrong elements.
//
// Thread safety: immutable once made.
// Lifetime: holds indexes into the locals it was made of, no pointers.
// Units: elements of the atom; boxes are half-open.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/tensor/piece.h"

namespace ckptfs {

class BoxIndex {
 public:
  static constexpr size_t kMinPieces = 64;
  static constexpr size_t kLeaf = 8;

  // Null where looking at all of them is as fast: of fewer than kMinPieces pieces that
  // have elements.
  static std::shared_ptr<const BoxIndex> Of(const std::vector<LocalTensor>& locals);

  // The number of locals that it was made of.
  size_t locals() const { return locals_; }
  uint64_t MemoryBytes() const;

  struct Entry {
    uint32_t local = 0;
    uint32_t piece = 0;
  };
  // visit(Entry), at most once each, for every piece that has elements in the box
  // [begin, end) and for some that have none; visit returns false to stop.  False if it
  // did.  REQUIRES: the atom's dimensions in both.
  template <class Visit>
  bool ForEach(std::span<const uint64_t> begin, std::span<const uint64_t> end,
               const Visit& visit) const {
    return Walk(0, 0, LeavesOf(entries_.size()), begin, end, visit);
  }

 private:
  friend class BoxIndexBuilder;

  static size_t LeavesOf(size_t entries) { return (entries + kLeaf - 1) / kLeaf; }
  static size_t LeftOf(size_t leaves) { return (leaves + 1) / 2; }

  bool Meets(size_t node, std::span<const uint64_t> begin, std::span<const uint64_t> end) const {
    const uint64_t* bounds = &bounds_[node * 2 * rank_];
    for (size_t d = 0; d < rank_; ++d) {
      if (bounds[d] >= end[d] || bounds[rank_ + d] <= begin[d]) return false;
    }
    return true;
  }

  // Builds the node of `leaves` leaves from `first` on.  Recursion is as deep as the tree, which
  // is halved at each level.
  template <class Visit>
  bool Walk(size_t node, size_t first, size_t leaves, std::span<const uint64_t> begin,
            std::span<const uint64_t> end, const Visit& visit) const {
    if (!Meets(node, begin, end)) return true;
    if (leaves == 1) {
      const size_t last = std::min(entries_.size(), (first + 1) * kLeaf);
      return std::all_of(entries_.begin() + static_cast<ptrdiff_t>(first * kLeaf),
                         entries_.begin() + static_cast<ptrdiff_t>(last), visit);
    }
    const size_t left = LeftOf(leaves);
    return Walk(node + 1, first, left, begin, end, visit) &&
           Walk(node + 2 * left, first + left, leaves - left, begin, end, visit);
  }

  size_t locals_ = 0;
  size_t rank_ = 0;
  std::vector<Entry> entries_;
  std::vector<uint64_t> bounds_;  // row-major [node][begin, end][dim]
};

}  // namespace ckptfs
