// SPDX-License-Identifier: Apache-2.0

#include "core/state/shared_rows.h"

#include <algorithm>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

namespace ckptfs {
namespace {

uint64_t VolumeOf(const Shape& shape) {
  uint64_t volume = 1;
  for (const uint64_t size : shape) volume *= size;
  return volume;
}

std::span<const uint64_t> Inner(const std::vector<uint64_t>& numbers) {
  return std::span(numbers).subspan(1);
}

// Orders boxes by the columns that they hold, then by their first row.
bool ByColumns(const DenseBox& a, const DenseBox& b) {
  const auto compare = [](std::span<const uint64_t> x, std::span<const uint64_t> y) {
    return std::lexicographical_compare_three_way(x.begin(), x.end(), y.begin(), y.end());
  };
  if (const auto begins = compare(Inner(a.begin), Inner(b.begin)); begins != 0) return begins < 0;
  if (const auto sizes = compare(Inner(a.shape), Inner(b.shape)); sizes != 0) return sizes < 0;
  return std::tie(a.begin[0], a.blob, a.offset) < std::tie(b.begin[0], b.blob, b.offset);
}

// True if b's rows follow a's, in the same columns.
bool Continues(const DenseBox& a, const DenseBox& b) {
  return a.begin[0] + a.shape[0] == b.begin[0] &&
         std::ranges::equal(Inner(a.begin), Inner(b.begin)) &&
         std::ranges::equal(Inner(a.shape), Inner(b.shape));
}

// Where the box begins in the row-major atom if it is one run of it.
std::optional<uint64_t> RunBegin(const Shape& atom, const DenseBox& box) {
  const std::vector<uint64_t> strides = RowMajorStrides(atom);
  uint64_t begin = 0;
  bool inside = false;  // behind the dimension that is cut
  for (size_t d = 0; d < atom.size(); ++d) {
    if (inside && box.shape[d] != atom[d]) return std::nullopt;
    inside |= box.shape[d] != 1;
    begin += box.begin[d] * strides[d];
  }
  return begin;
}

Fragment FragmentAt(uint64_t begin, const DenseBox& box) {
  return {begin, begin + VolumeOf(box.shape), box.blob, box.offset, box.dtype};
}

LocalTensor LocalOfRows(const DenseBox& first, const DenseBox& last) {
  Shape shape = first.shape;
  shape[0] = last.begin[0] + last.shape[0] - first.begin[0];
  return {shape, {Piece{shape, first.begin, 0, RowMajorStrides(shape), 1.0}}};
}

}  // namespace

void SharedRows::Add(DenseBox box) {
  if (VolumeOf(box.shape) > 0) boxes_.push_back(std::move(box));
}

// False if the boxes are not runs of the atom; beside others also if they do not follow each
// other from its begin to its end.
bool SharedRows::PlaceRuns(Assembler& assembler, AtomIndex atom, uint32_t copy,
                           Beside beside) const {
  std::vector<std::pair<uint64_t, const DenseBox*>> runs;
  for (const DenseBox& box : boxes_) {
    const auto begin = RunBegin(atom_, box);
    if (!begin) return false;
    runs.emplace_back(*begin, &box);
  }
  std::ranges::stable_sort(runs, {}, [](const auto& run) { return run.first; });
  uint64_t end = 0;
  bool whole = true;
  for (const auto& [begin, box] : runs) {
    whole = whole && begin == end;
    end += VolumeOf(box->shape);
  }
  // Without dimensions there are no rows: the proof finds what overlaps.
  const bool apart = beside == Beside::kOthers && !atom_.empty();
  if (apart && !(whole && end == VolumeOf(atom_))) return false;
  const uint32_t local = assembler.AddLocal(atom, copy, WholeTensor(atom_));
  for (const auto& [begin, box] : runs) {
    assembler.AddFragment(atom, copy, local, FragmentAt(begin, *box));
  }
  return true;
}

void SharedRows::Place(Assembler& assembler, AtomIndex atom, uint32_t copy, Beside beside) && {
  if (boxes_.empty() && VolumeOf(atom_) > 0) return;
  if (PlaceRuns(assembler, atom, copy, beside)) return;
  std::ranges::sort(boxes_, ByColumns);
  for (size_t first = 0; first < boxes_.size();) {
    size_t end = first + 1;
    while (end < boxes_.size() && Continues(boxes_[end - 1], boxes_[end])) ++end;
    const uint32_t local =
        assembler.AddLocal(atom, copy, LocalOfRows(boxes_[first], boxes_[end - 1]));
    uint64_t begin = 0;
    for (; first < end; ++first) {
      const Fragment fragment = FragmentAt(begin, boxes_[first]);
      assembler.AddFragment(atom, copy, local, fragment);
      begin = fragment.flat_end;
    }
  }
}

std::optional<std::vector<DenseBox>> DenseBoxesOf(const StatePart& part, const Shape& stored,
                                                  const Fragment& tensor) {
  if (part.flat || part.pieces.empty() || !part.order.empty()) return std::nullopt;
  const std::vector<uint64_t> strides = RowMajorStrides(stored);
  std::vector<DenseBox> boxes;
  for (const StateBox& piece : part.pieces) {
    DenseBox box{piece.begin, {}, tensor.blob, tensor.offset, tensor.dtype};
    for (size_t d = 0; d < stored.size(); ++d) {
      box.shape.push_back(piece.end[d] - piece.begin[d]);
      if (d > 0 && box.shape[d] != stored[d]) return std::nullopt;
    }
    if (!stored.empty()) box.offset += piece.at[0] * strides[0] * ByteWidth(tensor.dtype);
    boxes.push_back(std::move(box));
  }
  return boxes;
}

}  // namespace ckptfs
