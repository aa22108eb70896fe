// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/box_runs.h"

#include <algorithm>

namespace ckptfs {

std::optional<BoxRuns> BoxRuns::Intersect(const Piece& target, const Piece& source) {
  std::optional<BoxRuns> result(std::in_place);
  BoxRuns& runs = *result;
  runs.target_ = target.local_offset;
  runs.source_ = source.local_offset;
  for (size_t d = 0; d < target.shape.size(); ++d) {
    const uint64_t begin = std::max(target.atom_begin[d], source.atom_begin[d]);
    const uint64_t end =
        std::min(target.atom_begin[d] + target.shape[d], source.atom_begin[d] + source.shape[d]);
    if (begin >= end) return std::nullopt;
    runs.target_ += (begin - target.atom_begin[d]) * target.local_strides[d];
    runs.source_ += (begin - source.atom_begin[d]) * source.local_strides[d];
    if (end - begin == 1) continue;
    runs.loops_[runs.rank_++] =
        LoopDim{end - begin, target.local_strides[d], source.local_strides[d], 0};
  }
  runs.SortAndMerge();
  return result;
}

void BoxRuns::SortAndMerge() {
  if (rank_ == 0) loops_[rank_++] = LoopDim{1, 1, 1, 0};
  std::stable_sort(loops_.begin(), loops_.begin() + rank_, [](const LoopDim& a, const LoopDim& b) {
    return a.target_stride > b.target_stride;
  });
  uint32_t kept = 0;
  for (uint32_t d = 1; d < rank_; ++d) {
    LoopDim& outer = loops_[kept];
    const LoopDim& inner = loops_[d];
    if (outer.target_stride == inner.count * inner.target_stride &&
        outer.source_stride == inner.count * inner.source_stride) {
      outer = LoopDim{outer.count * inner.count, inner.target_stride, inner.source_stride, 0};
    } else {
      loops_[++kept] = inner;
    }
  }
  rank_ = kept + 1;
  uint64_t extent = 0;
  for (uint32_t d = rank_; d-- > 0;) {
    loops_[d].inner_extent = extent;
    extent += (loops_[d].count - 1) * loops_[d].target_stride;
  }
}

}  // namespace ckptfs
