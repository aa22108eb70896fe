// SPDX-License-Identifier: Apache-2.0

#include "core/model/box_index.h"

#include <limits>
#include <tuple>

namespace ckptfs {

class BoxIndexBuilder {
 public:
  BoxIndexBuilder(const std::vector<LocalTensor>& locals, BoxIndex& out)
      : locals_(locals), out_(out) {}

  // False: there is nothing to gain.
  bool Build() {
    for (uint32_t i = 0; i < locals_.size(); ++i) {
      for (uint32_t p = 0; p < locals_[i].pieces.size(); ++p) {
        const Shape& shape = locals_[i].pieces[p].shape;
        if (std::ranges::find(shape, 0) == shape.end()) out_.entries_.push_back({i, p});
      }
    }
    if (out_.entries_.size() < BoxIndex::kMinPieces) return false;
    out_.rank_ = PieceOf(out_.entries_[0]).shape.size();
    if (out_.rank_ == 0) return false;
    for (const Entry entry : out_.entries_) {
      const Piece& piece = PieceOf(entry);
      if (piece.shape.size() != out_.rank_ || piece.atom_begin.size() != out_.rank_) return false;
    }
    out_.locals_ = locals_.size();
    out_.entries_.shrink_to_fit();
    const size_t leaves = BoxIndex::LeavesOf(out_.entries_.size());
    out_.bounds_.resize((2 * leaves - 1) * 2 * out_.rank_);
    Split(0, 0, leaves);
    return true;
  }

 private:
  using Entry = BoxIndex::Entry;

  const Piece& PieceOf(Entry entry) const { return locals_[entry.local].pieces[entry.piece]; }

  std::span<Entry> EntriesOf(size_t first, size_t leaves) {
    const size_t begin = first * BoxIndex::kLeaf;
    const size_t end = std::min(out_.entries_.size(), (first + leaves) * BoxIndex::kLeaf);
    return std::span(out_.entries_).subspan(begin, end - begin);
  }

  void Bound(size_t node, std::span<const Entry> entries) {
    const std::span bounds = std::span(out_.bounds_).subspan(node * 2 * out_.rank_, 2 * out_.rank_);
    for (size_t d = 0; d < out_.rank_; ++d) {
      uint64_t begin = std::numeric_limits<uint64_t>::max();
      uint64_t end = 0;
      for (const Entry entry : entries) {
        const Piece& piece = PieceOf(entry);
        begin = std::min(begin, piece.atom_begin[d]);
        end = std::max(end, piece.atom_begin[d] + piece.shape[d]);
      }
      bounds[d] = begin;
      bounds[out_.rank_ + d] = end;
    }
  }

  // The dim in which most pieces lie beside each other.
  size_t SplitDim(size_t node, std::span<const Entry> entries) const {
    size_t best = 0;
    double most = -1;
    for (size_t d = 0; d < out_.rank_; ++d) {
      double sizes = 0;
      for (const Entry entry : entries) sizes += static_cast<double>(PieceOf(entry).shape[d]);
      const uint64_t* bounds = &out_.bounds_[node * 2 * out_.rank_];
      const double beside =
          static_cast<double>(bounds[out_.rank_ + d] - bounds[d]) / std::max(sizes, 1.0);
      if (beside > most) std::tie(best, most) = std::tie(d, beside);
    }
    return best;
  }

  void Split(size_t node, size_t first, size_t leaves) {
    const std::span<Entry> entries = EntriesOf(first, leaves);
    Bound(node, entries);
    const auto by_place = [](Entry entry) { return std::tuple(entry.local, entry.piece); };
    if (leaves == 1) {  // runs of a leaf come in the order of locals
      std::ranges::sort(entries, {}, by_place);
      return;
    }
    const size_t left = BoxIndex::LeftOf(leaves);
    const size_t dim = SplitDim(node, entries);
    std::ranges::nth_element(
        entries, entries.begin() + static_cast<ptrdiff_t>(left * BoxIndex::kLeaf), {},
        [&](Entry entry) {
          return std::tuple(PieceOf(entry).atom_begin[dim], entry.local, entry.piece);
        });
    Split(node + 1, first, left);
    Split(node + 2 * left, first + left, leaves - left);
  }

  const std::vector<LocalTensor>& locals_;
  BoxIndex& out_;
};

std::shared_ptr<const BoxIndex> BoxIndex::Of(const std::vector<LocalTensor>& locals) {
  if (locals.empty() || locals.size() > std::numeric_limits<uint32_t>::max()) return nullptr;
  auto out = std::make_shared<BoxIndex>();
  return BoxIndexBuilder(locals, *out).Build() ? out : nullptr;
}

uint64_t BoxIndex::MemoryBytes() const {
  return sizeof(*this) + entries_.capacity() * sizeof(Entry) +
         bounds_.capacity() * sizeof(uint64_t);
}

}  // namespace ckptfs
