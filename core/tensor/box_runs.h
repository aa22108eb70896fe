// SPDX-License-Identifier: Apache-2.0
//
// BoxRuns is the intersection of two pieces of one atom, a target's and a
// source's, as nested loops: both flat offsets are affine in the loop indexes.
// Loops are ordered by target stride and merged where both sides are
// contiguous, so that the innermost loop is as long a run as there is.
//
// Thread safety: immutable value.
// Lifetime: keeps nothing of the pieces.
// Units: elements; flat offsets are into the two local tensors.

#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/tensor/piece.h"

namespace ckptfs {

class BoxRuns {
 public:
  // Nothing if the boxes do not meet.
  // REQUIRES: both pieces pass ValidateLocal for the same atom.
  static std::optional<BoxRuns> Intersect(const Piece& target, const Piece& source);

  // Strides of the elements within one run.
  uint64_t target_stride() const { return loops_[rank_ - 1].target_stride; }
  uint64_t source_stride() const { return loops_[rank_ - 1].source_stride; }

  // visit(target_flat, source_flat, count) for every run, clipped to target
  // offsets [begin, end); visit returns false to stop.  Loops that lie outside
  // are skipped by arithmetic: the cost follows the runs inside, not the box.
  // Returns false if stopped.
  template <class Visit>
  bool ForEach(uint64_t begin, uint64_t end, Visit&& visit) const {
    return Loop(0, target_, source_, begin, end, visit);
  }

 private:
  struct LoopDim {
    uint64_t count;
    uint64_t target_stride;
    uint64_t source_stride;
    uint64_t inner_extent;  // target offset of the last element of the loops inside
  };

  void SortAndMerge();

  template <class Visit>
  bool Loop(uint32_t level, uint64_t target, uint64_t source, uint64_t begin, uint64_t end,
            Visit&& visit) const {
    const LoopDim& loop = loops_[level];
    // First and one-past-last index whose inner loops can meet [begin, end).
    uint64_t first = 0;
    uint64_t last = loop.count;
    if (target >= end) return true;
    if (loop.target_stride > 0) {
      if (target + loop.inner_extent < begin) {
        first = (begin - target - loop.inner_extent + loop.target_stride - 1) / loop.target_stride;
      }
      const uint64_t limit = (end - 1 - target) / loop.target_stride + 1;
      if (limit < last) last = limit;
    }
    if (first >= last) return true;
    target += first * loop.target_stride;
    source += first * loop.source_stride;
    if (level + 1 == rank_) return visit(target, source, last - first);
    for (uint64_t i = first; i < last; ++i) {
      if (!Loop(level + 1, target, source, begin, end, visit)) return false;
      target += loop.target_stride;
      source += loop.source_stride;
    }
    return true;
  }

  uint32_t rank_ = 0;  // at least 1
  uint64_t target_ = 0;
  uint64_t source_ = 0;
  std::array<LoopDim, kMaxDimensions + 1> loops_;  // outermost first
};

}  // namespace ckptfs
