// SPDX-License-Identifier: Apache-2.0

#include "core/view/source_runs.h"

namespace ckptfs {

std::optional<uint64_t> ExtentOf(uint64_t count, uint64_t stride, uint32_t width) {
  uint64_t reach;
  if (__builtin_mul_overflow(count - 1, stride, &reach) ||
      __builtin_add_overflow(reach, 1, &reach) || __builtin_mul_overflow(reach, width, &reach)) {
    return std::nullopt;
  }
  return reach;
}

FragmentCursor::FragmentCursor(const Gather& gather, uint32_t local) {
  const FragmentSeries* all = gather.series.data();
  const FragmentSeries* all_end = all + gather.series.size();
  first_ = std::partition_point(
      all, all_end, [local](const FragmentSeries& series) { return series.local < local; });
  last_ = std::partition_point(
      first_, all_end, [local](const FragmentSeries& series) { return series.local == local; });
  now_ = first_;
}

bool FragmentCursor::Find(uint64_t flat) {
  const bool here =
      now_ != last_ && flat >= now_->flat_begin && (now_ + 1 == last_ || flat < now_[1].flat_begin);
  if (!here) {
    now_ = std::partition_point(
        first_, last_, [flat](const FragmentSeries& series) { return series.flat_begin <= flat; });
    if (now_ == first_) return false;
    --now_;
  }
  uint64_t k = now_->flat_step == 0 ? 0 : (flat - now_->flat_begin) / now_->flat_step;
  k = std::min<uint64_t>(k, now_->count - 1);
  const Fragment fragment = now_->At(static_cast<uint32_t>(k));
  if (flat < fragment.flat_begin || flat >= fragment.flat_end) return false;
  begin_ = fragment.flat_begin;
  end_ = fragment.flat_end;
  offset_ = fragment.offset;
  blob_ = fragment.blob;
  dtype_ = fragment.dtype;
  bits_ = BitWidth(fragment.dtype);
  return true;
}

DenseRange DenseRangeOf(const Piece& piece) {
  uint64_t expected = 1;
  for (size_t d = piece.shape.size(); d-- > 0;) {
    if (piece.shape[d] == 1) continue;
    if (piece.shape[d] == 0 || piece.local_strides[d] != expected) return {};
    expected *= piece.shape[d];
  }
  return DenseRange{true, piece.local_offset, piece.local_offset + expected};
}

uint64_t EndOf(const Piece& piece) {
  uint64_t last = piece.local_offset;
  for (size_t d = 0; d < piece.shape.size(); ++d) {
    if (piece.shape[d] == 0) return 0;
    last += (piece.shape[d] - 1) * piece.local_strides[d];
  }
  return last + 1;
}

AtomBox BoxWithin(const Piece& piece, uint64_t begin, uint64_t end) {
  AtomBox box;
  uint64_t low = piece.local_offset;        // of all that is not left out yet
  uint64_t reach = EndOf(piece) - 1 - low;  // from there to the last
  for (size_t d = 0; d < piece.shape.size(); ++d) {
    const uint64_t stride = piece.local_strides[d];
    const uint64_t others = reach - (piece.shape[d] - 1) * stride;
    uint64_t first = 0;
    uint64_t last = piece.shape[d];
    if (stride > 0) {  // index i lies at offsets [low + i * stride, that + others]
      if (begin > low + others) first = (begin - low - others + stride - 1) / stride;
      last = end > low ? std::min(last, (end - low + stride - 1) / stride) : 0;
    }
    last = std::max(first, last);
    box.begin[d] = piece.atom_begin[d] + first;
    box.end[d] = piece.atom_begin[d] + last;
    if (first == last) continue;  // empty, whatever the others are
    low += first * stride;
    reach = others + (last - 1 - first) * stride;
  }
  return box;
}

uint64_t ElementsWithin(const Piece& piece, uint64_t begin, uint64_t end) {
  if (const DenseRange range = DenseRangeOf(piece); range.dense) {
    const uint64_t from = std::max(begin, range.begin);
    const uint64_t to = std::min(end, range.end);
    return to > from ? to - from : 0;
  }
  uint64_t elements = 0;
  if (const auto runs = BoxRuns::Intersect(piece, piece)) {
    runs->ForEach(begin, end, [&elements](uint64_t, uint64_t, uint64_t count) {
      elements += count;
      return true;
    });
  }
  return elements;
}

}  // namespace ckptfs
