// SPDX-License-Identifier: Apache-2.0

#include "core/state/tiling.h"

#include <algorithm>
#include <random>
#include <tuple>

#include "core/base/digest.h"

namespace ckptfs {
namespace {

// Comparisons of one sweep: all pairs of few boxes, and a number for each of many.
constexpr uint64_t kLeastCompared = 4096;
constexpr uint64_t kComparedPerBox = 16;

bool Overlap(const Piece& a, const Piece& b) {
  for (size_t d = 0; d < a.shape.size(); ++d) {
    if (a.atom_begin[d] + a.shape[d] <= b.atom_begin[d]) return false;
    if (b.atom_begin[d] + b.shape[d] <= a.atom_begin[d]) return false;
  }
  return true;
}

// Sorted, each once.  Mostly there are few: a dimension is cut into so many parts, however many
// boxes that gives.
std::vector<uint64_t> DistinctOf(std::vector<uint64_t> values) {
  constexpr size_t kFew = 16;
  std::vector<uint64_t> few;
  for (const uint64_t value : values) {
    if (std::find(few.begin(), few.end(), value) == few.end()) few.push_back(value);
    if (few.size() > kFew) break;
  }
  if (few.size() <= kFew) values.swap(few);
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

// The dim along which a sweep separates most boxes.
size_t SweepDim(const std::vector<LocalBox>& boxes, size_t rank) {
  size_t best = 0;
  size_t most = 0;
  for (size_t d = 0; d < rank; ++d) {
    std::vector<uint64_t> begins(boxes.size());
    for (size_t i = 0; i < boxes.size(); ++i) begins[i] = boxes[i].piece->atom_begin[d];
    const size_t distinct = DistinctOf(std::move(begins)).size();
    if (distinct > most) std::tie(best, most) = std::pair(d, distinct);
  }
  return best;
}

// Two boxes overlap only where they do along the sweep's dim, so that sorted boxes are compared
// with few others.  Nothing if they are not few.
std::optional<TilingReport> Sweep(std::vector<LocalBox>& boxes, size_t rank) {
  const size_t dim = SweepDim(boxes, rank);
  std::sort(boxes.begin(), boxes.end(), [dim](const LocalBox& a, const LocalBox& b) {
    return a.piece->atom_begin[dim] < b.piece->atom_begin[dim];
  });
  uint64_t left = std::max(kLeastCompared, kComparedPerBox * boxes.size());
  for (size_t i = 0; i < boxes.size(); ++i) {
    const uint64_t end = boxes[i].piece->atom_begin[dim] + boxes[i].piece->shape[dim];
    for (size_t j = i + 1; j < boxes.size() && boxes[j].piece->atom_begin[dim] < end; ++j) {
      if (left-- == 0) return std::nullopt;
      if (Overlap(*boxes[i].piece, *boxes[j].piece)) {
        return TilingReport{Tiling::kOverlaps, {boxes[i], boxes[j]}};
      }
    }
  }
  return TilingReport{Tiling::kDisjoint};
}

// ---- by random numbers ---------------------------------------------------------

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

uint64_t Reduce(unsigned __int128 value) {
  uint64_t reduced = static_cast<uint64_t>(value & kPrime) + static_cast<uint64_t>(value >> 61);
  return reduced >= kPrime ? reduced - kPrime : reduced;
}

// Two independent elements of the field.
struct Weight {
  uint64_t first = 1;
  uint64_t second = 1;

  bool operator==(const Weight&) const = default;
  Weight operator*(const Weight& other) const {
    using Wide = unsigned __int128;
    return {Reduce(Wide{first} * other.first), Reduce(Wide{second} * other.second)};
  }
  Weight operator-(const Weight& other) const {
    return {Reduce(first + (kPrime - other.first)), Reduce(second + (kPrime - other.second))};
  }
  Weight operator+(const Weight& other) const {
    return {Reduce(first + other.first), Reduce(second + other.second)};
  }
};

// The sums of the intervals' numbers from 0 up to each border between two intervals: random
// themselves, which makes their differences so.
class Borders {
 public:
  explicit Borders(std::vector<uint64_t> at) : at_(DistinctOf(std::move(at))) {}
  size_t size() const { return at_.size(); }
  void Draw(std::mt19937_64& random) {
    std::uniform_int_distribution<uint64_t> element(0, kPrime - 1);
    sums_.resize(at_.size());
    for (Weight& sum : sums_) sum = Weight{element(random), element(random)};
  }
  Weight Between(uint64_t begin, uint64_t end) const { return SumTo(end) - SumTo(begin); }

 private:
  Weight SumTo(uint64_t border) const {
    return sums_[static_cast<size_t>(std::lower_bound(at_.begin(), at_.end(), border) -
                                     at_.begin())];
  }

  std::vector<uint64_t> at_;
  std::vector<Weight> sums_;
};

// Nobody outside of the process can know the numbers.
std::mt19937_64 Unpredictable() {
  const Digest a = RandomDigest(), b = RandomDigest();
  std::seed_seq seed{a.high, a.high >> 32, a.low, a.low >> 32,
                     b.high, b.high >> 32, b.low, b.low >> 32};
  return std::mt19937_64(seed);
}

bool WeighAsMuch(const std::vector<LocalBox>& boxes, const Shape& atom) {
  std::mt19937_64 random = Unpredictable();
  std::vector<Weight> weights(boxes.size());
  Weight whole;
  for (size_t d = 0; d < atom.size(); ++d) {
    std::vector<uint64_t> at = {0, atom[d]};
    at.reserve(2 + 2 * boxes.size());
    for (const LocalBox& box : boxes) {
      at.push_back(box.piece->atom_begin[d]);
      at.push_back(box.piece->atom_begin[d] + box.piece->shape[d]);
    }
    Borders borders(std::move(at));
    if (borders.size() == 2) continue;  // no box is cut here
    borders.Draw(random);
    whole = whole * borders.Between(0, atom[d]);
    for (size_t i = 0; i < boxes.size(); ++i) {
      const uint64_t begin = boxes[i].piece->atom_begin[d];
      weights[i] = weights[i] * borders.Between(begin, begin + boxes[i].piece->shape[d]);
    }
  }
  Weight sum{0, 0};
  for (const Weight& weight : weights) sum = sum + weight;
  return sum == whole;
}

}  // namespace

TilingReport JudgeTiling(std::vector<LocalBox> boxes, const Shape& atom) {
  if (boxes.size() < 2 || atom.empty()) return {Tiling::kDisjoint};  // the volume tells all
  if (auto swept = Sweep(boxes, atom.size())) return *std::move(swept);
  return {WeighAsMuch(boxes, atom) ? Tiling::kTiles : Tiling::kNot};
}

}  // namespace ckptfs
