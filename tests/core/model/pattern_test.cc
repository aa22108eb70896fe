// SPDX-License-Identifier: Apache-2.0
#include "core/model/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace ckptfs {
namespace {

using testing::HasSubstr;

constexpr int64_t kPadding = -1;

// The local tensor of an atom whose element i has the value i, read through
// the pieces one element at a time.
std::vector<int64_t> Fill(const LocalTensor& local, const Shape& atom) {
  EXPECT_TRUE(ValidateLocal(local, atom));
  std::vector<int64_t> values(*ElementCount(local.shape), kPadding);
  const std::vector<uint64_t> strides = RowMajorStrides(atom);
  for (const Piece& piece : local.pieces) {
    const uint64_t count = *ElementCount(piece.shape);
    for (uint64_t k = 0; k < count; ++k) {
      uint64_t rest = k, from = 0, to = piece.local_offset;
      for (size_t d = atom.size(); d-- > 0;) {
        const uint64_t i = rest % piece.shape[d];
        rest /= piece.shape[d];
        from += (piece.atom_begin[d] + i) * strides[d];
        to += i * piece.local_strides[d];
      }
      EXPECT_EQ(values[to], kPadding) << "two pieces overlap";
      values[to] = static_cast<int64_t>(from);
    }
  }
  return values;
}

std::vector<int64_t> Local(const Pattern& pattern, const Shape& atom, uint64_t rank,
                           uint64_t degree) {
  auto local = MakeLocal(pattern, atom, rank, degree);
  EXPECT_TRUE(local) << local.error().message;
  return local ? Fill(*local, atom) : std::vector<int64_t>{};
}

std::string Refusal(const Pattern& pattern, const Shape& atom, uint64_t degree) {
  auto local = MakeLocal(pattern, atom, 0, degree);
  return local ? "accepted" : local.error().message;
}

using Values = std::vector<int64_t>;

TEST(PatternTest, UnevenWidthsAreWhatEachRankHolds) {
  Pattern pattern = Pattern::Shard(0, {3, 2});
  pattern.cuts[0].widths = {2, 1, 0, 2};
  EXPECT_EQ(Local(pattern, {5}, 0, 2), (Values{0, 1}));
  EXPECT_EQ(Local(pattern, {5}, 1, 2), (Values{2, 3, 4}));
  EXPECT_EQ(Local(pattern, {5}, 0, 1), (Values{0, 1, 2, 3, 4}));
  EXPECT_THAT(Refusal(pattern, {5}, 4), HasSubstr("does not say how to cut it over 4"));
  EXPECT_THAT(Refusal(pattern, {6}, 2), HasSubstr("sum to 5"));
  pattern.cuts[0].widths = {2, 2, 0, 2};
  EXPECT_THAT(Refusal(pattern, {5}, 2), HasSubstr("the part is 3"));
  pattern.cuts[0].widths = {UINT64_MAX, 2, 0, 2};
  EXPECT_NE(Refusal(pattern, {5}, 2), "accepted");
}

TEST(PatternTest, WidthsMayPadTheEndOfASinglePart) {
  Pattern pattern = Pattern::Shard(0);
  pattern.cuts[0].widths = {3, 4};
  EXPECT_EQ(Local(pattern, {5}, 1, 2), (Values{3, 4, kPadding, kPadding}));
  EXPECT_THAT(Refusal(pattern, {8}, 2), HasSubstr("the part is 8"));
}

TEST(PatternTest, DegreeOneIsTheWholeAtomWhateverThePattern) {
  for (const Pattern& pattern :
       {Pattern{}, Pattern::Replicate(), Pattern::Shard(1), Pattern::Shard(0, {1, 1})}) {
    auto local = MakeLocal(pattern, {2, 3}, 0, 1);
    ASSERT_TRUE(local) << local.error().message;
    EXPECT_EQ(*local, WholeTensor({2, 3}));
  }
}

TEST(PatternTest, ShardsDimZeroAndOne) {
  EXPECT_EQ(Local(Pattern::Shard(0), {4, 2}, 1, 2), (Values{4, 5, 6, 7}));
  EXPECT_EQ(Local(Pattern::Shard(1), {2, 4}, 1, 2), (Values{2, 3, 6, 7}));
  EXPECT_EQ(Local(Pattern::Shard(1), {2, 4}, 3, 4), (Values{3, 7}));
}

TEST(PatternTest, ShardsEveryPartOfFusedDims) {
  // q 4 rows, k 2, v 2 at degree 2: rank 1 holds rows 2 3 | 5 | 7
  EXPECT_EQ(Local(Pattern::Shard(0, {4, 2, 2}), {8, 1}, 1, 2), (Values{2, 3, 5, 7}));
  EXPECT_EQ(Local(Pattern::Shard(1, {2, 2}), {2, 4}, 0, 2), (Values{0, 2, 4, 6}));
}

TEST(PatternTest, PadsTheVocabularyOnlyWhenCut) {
  Pattern vocab = Pattern::Shard(0);
  vocab.cuts[0].pad_multiple = 2;
  EXPECT_EQ(Local(vocab, {5, 1}, 0, 1), (Values{0, 1, 2, 3, 4}));
  EXPECT_EQ(Local(vocab, {5, 1}, 0, 2), (Values{0, 1, 2, 3}));
  EXPECT_EQ(Local(vocab, {5, 1}, 1, 2), (Values{4, kPadding, kPadding, kPadding}));
  EXPECT_EQ(Local(vocab, {5, 1}, 3, 4), (Values{kPadding, kPadding}));
  vocab.cuts[0].pad_always = true;
  EXPECT_EQ(Local(vocab, {5, 1}, 0, 1), (Values{0, 1, 2, 3, 4, kPadding}));
}

TEST(PatternTest, TakesTheSourcesRowsOverItsOwn) {
  Pattern vocab = Pattern::Shard(0);
  vocab.cuts[0].pad_multiple = 8;
  auto local = MakeLocalWithRows(vocab, {499, 2}, 1, 2, 256);
  ASSERT_TRUE(local) << local.error().message;
  EXPECT_EQ(local->shape, (Shape{256, 2}));
  ASSERT_EQ(local->pieces.size(), 1u);
  EXPECT_EQ(local->pieces[0].shape, (Shape{243, 2}));
  EXPECT_EQ(local->pieces[0].atom_begin, (std::vector<uint64_t>{256, 0}));

  EXPECT_FALSE(MakeLocalWithRows(vocab, {499, 2}, 1, 2, 249));       // 498 rows: too few
  EXPECT_FALSE(MakeLocalWithRows(Pattern::Shard(0), {4}, 0, 2, 3));  // padding not declared
  EXPECT_TRUE(MakeLocalWithRows(Pattern::Shard(0), {4}, 0, 2, 2));
  EXPECT_TRUE(MakeLocalWithRows(Pattern::Shard(1), {4, 6}, 0, 2, 3));  // rows of the cut dim
  EXPECT_FALSE(MakeLocalWithRows(Pattern::Replicate(), {4}, 0, 2, 2));
  EXPECT_TRUE(MakeLocalWithRows(Pattern::Replicate(), {4}, 0, 2, 4));
  EXPECT_FALSE(MakeLocalWithRows(vocab, {499, 2}, 1, 2, uint64_t{1} << 63));
}

TEST(PatternTest, CutsOnAGrid) {
  const Pattern grid{PatternKind::kShard, {Cut{0}, Cut{1}}, {2, 2}, false};
  EXPECT_EQ(Local(grid, {2, 4}, 1, 4), (Values{2, 3}));  // first half, second columns
  EXPECT_EQ(Local(grid, {2, 4}, 2, 4), (Values{4, 5}));
  EXPECT_EQ(Local(grid, {2, 4}, 0, 1).size(), 8u);
  EXPECT_THAT(Refusal(grid, {2, 4}, 2), HasSubstr("grid of 4 ranks"));
  EXPECT_EQ(PatternName(grid), "shard-hy");
}

TEST(PatternTest, ScalesBiasesByTheDegree) {
  Pattern bias = Pattern::Replicate();
  bias.bias_scaled = true;
  auto local = MakeLocal(bias, {3}, 1, 4);
  ASSERT_TRUE(local);
  EXPECT_EQ(local->pieces[0].scale, 0.25);
  EXPECT_EQ(local->pieces[0].shape, (Shape{3}));
}

TEST(PatternTest, HandlesZeroSizedAndScalarAtoms) {
  EXPECT_EQ(Local(Pattern::Replicate(), {}, 1, 2), (Values{0}));
  EXPECT_EQ(Local(Pattern::Shard(0), {0, 3}, 1, 2), (Values{}));
  EXPECT_EQ(Local(Pattern::Shard(1), {0, 4}, 1, 2), (Values{}));
}

TEST(PatternTest, RefusesWhatDoesNotFit) {
  EXPECT_THAT(Refusal(Pattern{}, {4}, 2), HasSubstr("no rule"));
  EXPECT_THAT(Refusal(Pattern::Shard(0), {5}, 2), HasSubstr("does not divide"));
  EXPECT_THAT(Refusal(Pattern::Shard(2), {4, 4}, 2), HasSubstr("cuts dim 2"));
  EXPECT_THAT(Refusal(Pattern::Shard(0, {2, 4}), {8}, 2), HasSubstr("sum to 6"));
  EXPECT_THAT(Refusal(Pattern::Shard(0, {3, 3}), {6}, 2), HasSubstr("3 does not divide"));
  EXPECT_THAT(Refusal(Pattern::Shard(0, {~uint64_t{0}, 4}), {8}, 1), HasSubstr("sum"));
  Pattern heads = Pattern::Shard(0);
  heads.cuts[0].unit = 4;
  EXPECT_EQ(Refusal(heads, {16}, 4), "accepted");
  EXPECT_THAT(Refusal(heads, {16}, 8), HasSubstr("cut through a unit of 4"));
  Pattern twice = Pattern{PatternKind::kShard, {Cut{0}, Cut{0}}, {2, 2}, false};
  EXPECT_THAT(Refusal(twice, {16}, 4), HasSubstr("twice"));
}

TEST(PatternTest, EveryElementIsHeldExactlyOnceOverTheRanks) {
  Pattern vocab = Pattern::Shard(0);
  vocab.cuts[0].pad_multiple = 3;
  const std::vector<std::pair<Pattern, Shape>> cases = {
      {vocab, {13, 2}},
      {Pattern::Shard(0, {8, 4, 4}), {16, 3}},
      {Pattern::Shard(1, {12, 4}), {3, 16}},
      {Pattern{PatternKind::kShard, {Cut{0}, Cut{2}}, {2, 2}, false}, {4, 3, 6}},
  };
  for (const auto& [pattern, shape] : cases) {
    std::vector<int> held(*ElementCount(shape), 0);
    for (uint64_t rank = 0; rank < 4; ++rank) {
      for (int64_t value : Local(pattern, shape, rank, 4)) {
        if (value != kPadding) ++held[static_cast<size_t>(value)];
      }
    }
    EXPECT_THAT(held, testing::Each(1)) << PatternName(pattern);
  }
}

}  // namespace
}  // namespace ckptfs
