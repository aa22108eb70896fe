// SPDX-License-Identifier: Apache-2.0
//
// Source runs are where the elements of a target local tensor lie: every run
// is `count` elements at a constant stride in one fragment of a source and at
// a constant stride in the target.  Finding them touches no tensor bytes.
//
// Thread safety: pure functions over immutable values.
// Lifetime: a cursor refers to the gather it was made for.
// Units: target offsets and strides are elements; blob offsets are bytes.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "core/base/result.h"
#include "core/model/box_index.h"
#include "core/model/fragment.h"
#include "core/tensor/box_runs.h"

namespace ckptfs {

struct SourceRun {
  uint64_t target = 0;         // flat offset of the first element in the target
  uint64_t target_stride = 1;  // elements
  BlobIndex blob{};
  uint64_t offset = 0;         // byte of the first element in the blob
  uint64_t source_stride = 1;  // elements
  uint64_t count = 0;
  DType stored = DType::kF32;
  double factor = 1.0;  // shown = stored * factor
  uint32_t local = 0;   // of the source, and the first element's place in it
  uint64_t flat = 0;
};

// Bytes from the first to past the last of `count` > 0 elements of `width` bytes
// at a stride; nothing on overflow.
std::optional<uint64_t> ExtentOf(uint64_t count, uint64_t stride, uint32_t width);

// Finds the fragment of a local tensor that holds an element, by binary search
// over the series and arithmetic within one; the last hit is tried first.
class FragmentCursor {
 public:
  FragmentCursor(const Gather& gather, uint32_t local);

  // False if no fragment holds element `flat`.
  bool Seek(uint64_t flat) {
    if (flat >= begin_ && flat < end_) return true;
    return Find(flat);
  }
  // The place of the fragment found last.
  uint64_t end() const { return end_; }
  BlobIndex blob() const { return blob_; }
  DType dtype() const { return dtype_; }
  // The byte in which the element begins.
  uint64_t OffsetOf(uint64_t flat) const { return offset_ + (flat - begin_) * bits_ / 8; }

 private:
  bool Find(uint64_t flat);

  const FragmentSeries* first_;
  const FragmentSeries* last_;  // one past
  const FragmentSeries* now_;
  uint64_t begin_ = 1;  // empty: nothing found yet
  uint64_t end_ = 0;
  uint64_t offset_ = 0;
  BlobIndex blob_{};
  DType dtype_ = DType::kF32;
  uint32_t bits_ = 0;
};

// The piece's elements in the target are [begin, end) without holes; nothing
// if they are not.
struct DenseRange {
  bool dense = false;
  uint64_t begin = 0;
  uint64_t end = 0;
};
DenseRange DenseRangeOf(const Piece& piece);

// How many of the piece's elements lie at target offsets [begin, end).
uint64_t ElementsWithin(const Piece& piece, uint64_t begin, uint64_t end);

// Largest target offset of the piece plus one; 0 if it is empty.
uint64_t EndOf(const Piece& piece);

enum class RunsEnd { kDone, kStopped, kHole };

namespace internal {

// The runs of one intersection, split at fragment borders.
template <class Visit>
RunsEnd VisitIntersection(const BoxRuns& runs, FragmentCursor& cursor, uint32_t local,
                          double factor, uint64_t begin, uint64_t end, uint64_t& visited,
                          Visit&& visit) {
  bool hole = false;
  const uint64_t target_stride = runs.target_stride();
  const uint64_t source_stride = runs.source_stride();
  const bool whole =
      runs.ForEach(begin, end, [&](uint64_t target, uint64_t source, uint64_t count) {
        while (count > 0) {
          if (!cursor.Seek(source)) {
            hole = true;
            return false;
          }
          const uint64_t room = cursor.end() - source;
          uint64_t n = source_stride == 1   ? room
                       : source_stride == 0 ? count
                                            : (room + source_stride - 1) / source_stride;
          n = std::min(n, count);
          if (!visit(SourceRun{target, target_stride, cursor.blob(), cursor.OffsetOf(source),
                               source_stride, n, cursor.dtype(), factor, local, source})) {
            return false;
          }
          visited += n;
          target += n * target_stride;
          source += n * source_stride;
          count -= n;
        }
        return true;
      });
  if (hole) return RunsEnd::kHole;
  return whole ? RunsEnd::kDone : RunsEnd::kStopped;
}

}  // namespace internal

// A box of the atom, half-open.
struct AtomBox {
  std::array<uint64_t, kMaxDimensions> begin;
  std::array<uint64_t, kMaxDimensions> end;
};
// One that has all the piece's elements at target offsets [begin, end), and as few others
// as one look at each dimension tells.
AtomBox BoxWithin(const Piece& piece, uint64_t begin, uint64_t end);

// visit(const SourceRun&) for the elements of `target` at flat offsets
// [begin, end); visit returns false to stop.  kHole: some mapped element is in
// no fragment (what was visited before is right).
// REQUIRES: all local tensors pass ValidateLocal for the same atom.
template <class Visit>
RunsEnd ForEachSourceRun(const Gather& gather, const LocalTensor& target, uint64_t begin,
                         uint64_t end, Visit&& visit) {
  const BoxIndex* index = gather.index.get();
  if (index != nullptr && index->locals() != gather.locals.size()) index = nullptr;
  for (const Piece& piece : target.pieces) {
    if (piece.local_offset >= end || EndOf(piece) <= begin) continue;
    const uint64_t wanted = ElementsWithin(piece, begin, end);
    uint64_t visited = 0;
    RunsEnd how = RunsEnd::kDone;
    // False: no more of this piece.
    const auto take = [&](uint32_t local, const Piece& source) {
      const auto runs = BoxRuns::Intersect(piece, source);
      if (!runs) return true;
      FragmentCursor cursor(gather, local);
      const double factor = piece.scale == source.scale ? 1.0 : piece.scale / source.scale;
      how = internal::VisitIntersection(*runs, cursor, local, factor, begin, end, visited, visit);
      return how == RunsEnd::kDone && visited < wanted;
    };
    if (index != nullptr) {
      const AtomBox box = BoxWithin(piece, begin, end);
      index->ForEach(std::span(box.begin).first(piece.shape.size()),
                     std::span(box.end).first(piece.shape.size()), [&](BoxIndex::Entry entry) {
                       const auto& pieces = gather.locals[entry.local].pieces;
                       return entry.piece >= pieces.size() ||
                              take(entry.local, pieces[entry.piece]);
                     });
    } else {
      bool more = wanted > 0;
      for (uint32_t local = 0; local < gather.locals.size() && more; ++local) {
        for (const Piece& source : gather.locals[local].pieces) {
          if (!(more = take(local, source))) break;
        }
      }
    }
    if (how != RunsEnd::kDone) return how;
    if (visited != wanted) return RunsEnd::kHole;
  }
  return RunsEnd::kDone;
}

}  // namespace ckptfs
