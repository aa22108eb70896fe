// SPDX-License-Identifier: Apache-2.0
//
// The coverage proof on what a file may hold to make it long, or wrong.
#include "core/state/coverage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "core/base/strings.h"
#include "core/state/assembler.h"
#include "core/state/tiling.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

Piece BoxAt(Shape begin, Shape shape) {
  Piece piece;
  piece.local_strides = RowMajorStrides(shape);
  piece.atom_begin = std::move(begin);
  piece.shape = std::move(shape);
  return piece;
}

// Each box is a local tensor of its own, whole in one file.
Gather GatherOf(const std::vector<Piece>& boxes) {
  Gather gather;
  for (const Piece& box : boxes) {
    const uint64_t elements = *ElementCount(box.shape);
    const auto local = static_cast<uint32_t>(gather.locals.size());
    gather.locals.push_back(LocalTensor{box.shape, {box}});
    gather.series.push_back(FragmentSeries{local, 1, 0, 0, elements, 0, 0, 0, 0, DType::kF32});
  }
  return gather;
}

std::string WhyNot(const std::vector<Piece>& boxes, const Shape& atom) {
  const Status proven = ProveCoverage(GatherOf(boxes), atom);
  return proven ? "" : proven.error().message;
}

// Every dimension but the first is cut in two: no sweep along one of them tells boxes apart.
std::vector<Piece> Corners(size_t dims) {
  std::vector<Piece> boxes;
  for (uint64_t corner = 0; corner < uint64_t{1} << dims; ++corner) {
    Shape begin = {0}, shape = {2};
    for (size_t d = 0; d < dims; ++d) {
      begin.push_back(corner >> d & 1);
      shape.push_back(1);
    }
    boxes.push_back(BoxAt(std::move(begin), std::move(shape)));
  }
  return boxes;
}

// 2^32 comparisons of each with each: this test ends because there are none.
TEST(CoverageTest, BoxesThatNoSweepSeparatesAreProven) {
  std::vector<Piece> boxes = Corners(16);
  const Shape atom(17, 2);
  EXPECT_EQ(WhyNot(boxes, atom), "");
  boxes[4711].atom_begin = boxes[4712].atom_begin;
  EXPECT_THAT(WhyNot(boxes, atom), HasSubstr("65536 boxes of its local tensors overlap"));
  boxes.pop_back();
  EXPECT_THAT(WhyNot(boxes, atom), HasSubstr("hold 131070 of the 131072 elements"));
}

TEST(CoverageTest, AGridIsProvenAndEachExchangeFound) {
  std::mt19937 random(3);
  std::vector<Piece> grid;
  std::vector<uint64_t> rows = {0}, columns = {0};
  while (rows.size() < 80) rows.push_back(rows.back() + 1 + random() % 3);
  while (columns.size() < 80) columns.push_back(columns.back() + 1 + random() % 3);
  for (size_t r = 0; r + 1 < rows.size(); ++r) {
    for (size_t c = 0; c + 1 < columns.size(); ++c) {
      grid.push_back(
          BoxAt({rows[r], columns[c]}, {rows[r + 1] - rows[r], columns[c + 1] - columns[c]}));
    }
  }
  const Shape atom = {rows.back(), columns.back()};
  EXPECT_EQ(WhyNot(grid, atom), "");
  for (int round = 0; round < 20; ++round) {
    std::vector<Piece> wrong = grid;
    Piece& moved = wrong[random() % wrong.size()];
    moved.atom_begin[round % 2] += moved.atom_begin[round % 2] == 0 ? 1 : -1;
    EXPECT_NE(WhyNot(wrong, atom), "") << round;
  }
}

// Cuts of cuts, none of which goes through: neither a grid nor slices.
void CutApart(const Piece& box, int depth, std::mt19937& random, std::vector<Piece>& out) {
  const size_t d = random() % box.shape.size();
  if (depth == 0 || box.shape[d] < 2) return out.push_back(box);
  const uint64_t at = 1 + random() % (box.shape[d] - 1);
  Shape low = box.shape, high = box.shape, begin = box.atom_begin;
  low[d] = at;
  high[d] -= at;
  begin[d] += at;
  CutApart(BoxAt(box.atom_begin, low), depth - 1, random, out);
  CutApart(BoxAt(begin, high), depth - 1, random, out);
}

TEST(TilingTest, AgreesWithComparingAllPairs) {
  std::mt19937 random(11);
  for (int round = 0; round < 60; ++round) {
    const Shape atom(2 + random() % 3, 40);
    std::vector<Piece> boxes;
    CutApart(BoxAt(Shape(atom.size(), 0), atom), 10, random, boxes);
    if (round % 2 == 1) {  // one is elsewhere, inside the atom
      Piece& moved = boxes[random() % boxes.size()];
      for (size_t d = 0; d < atom.size(); ++d) {
        moved.atom_begin[d] = random() % (atom[d] - moved.shape[d] + 1);
      }
    }
    bool overlaps = false;
    for (size_t i = 0; i < boxes.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        bool apart = false;
        for (size_t d = 0; d < atom.size(); ++d) {
          apart |= boxes[i].atom_begin[d] + boxes[i].shape[d] <= boxes[j].atom_begin[d] ||
                   boxes[j].atom_begin[d] + boxes[j].shape[d] <= boxes[i].atom_begin[d];
        }
        overlaps |= !apart;
      }
    }
    EXPECT_EQ(WhyNot(boxes, atom).empty(), !overlaps) << "round " << round;
  }
}

// Element 2k of a local tensor is stored, element 2k + 1 is not; `pieces` of it are shown.
Gather EverySecond(std::vector<Piece> pieces, uint32_t count) {
  Gather gather;
  gather.locals.push_back(LocalTensor{{uint64_t{2} * count}, std::move(pieces)});
  gather.series.push_back(FragmentSeries{0, count, 0, 2, 1, 0, 0, 0, 4, DType::kF32});
  return gather;
}

TEST(CoverageTest, HolesBetweenWhatIsShownAreNotDefects) {
  Piece even = BoxAt({0}, {1000});
  even.local_strides = {2};
  EXPECT_TRUE(ProveCoverage(EverySecond({even}, 1000), {1000}));
  even.local_offset = 1;
  const Status odd = ProveCoverage(EverySecond({even}, 1000), {1000});
  ASSERT_FALSE(odd);
  EXPECT_THAT(odd.error().message, HasSubstr("elements [1, 2) of local tensor 0 are in no file"));
}

TEST(CoverageTest, TooManyGapsAreRefusedByName) {
  Piece first = BoxAt({0}, {1});
  const Status proven = ProveCoverage(EverySecond({first}, UINT32_MAX), {1});
  ASSERT_FALSE(proven);
  EXPECT_THAT(proven.error().message, HasSubstr("takes too long"));
}

// The image of such a piece straddles every hole without meeting one, in 2^30 ways.
TEST(CoverageTest, PiecesThatWindAroundHolesAreRefusedByName) {
  constexpr size_t kDims = 30;
  Piece winding = BoxAt(Shape(kDims, 0), Shape(kDims, 2));
  winding.local_strides = std::vector<uint64_t>(kDims, 2);
  const Status proven = ProveCoverage(EverySecond({winding}, 1000), Shape(kDims, 2));
  ASSERT_FALSE(proven);
  EXPECT_THAT(proven.error().message, HasSubstr("takes too long"));
}

// The proofs of one file share one budget.
TEST(CoverageTest, TheBudgetIsTheFiles) {
  Piece first = BoxAt({0}, {1});
  ProofBudget budget;
  const Gather gather = EverySecond({first}, 1 << 24);
  int proven = 0;
  while (proven < 100 && ProveCoverage(gather, {1}, budget)) ++proven;
  EXPECT_GE(proven, 1);
  EXPECT_LE(proven, 4);
}

}  // namespace
}  // namespace ckptfs
