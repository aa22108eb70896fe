// SPDX-License-Identifier: Apache-2.0
#include "core/model/source_pattern.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

using Widths = std::vector<uint64_t>;

// Returns the local tensors that the ranks hold by `pattern`.
std::vector<LocalTensor> Ranks(const Pattern& pattern, const Shape& shape, uint64_t degree) {
  std::vector<LocalTensor> locals;
  for (uint64_t rank = 0; rank < degree; ++rank) {
    auto local = MakeLocal(pattern, shape, rank, degree);
    EXPECT_TRUE(local) << local.error().message;
    if (local) locals.push_back(*std::move(local));
  }
  return locals;
}

Pattern Uneven(uint32_t dim, Widths parts, Widths widths) {
  Pattern pattern = Pattern::Shard(dim, std::move(parts));
  pattern.cuts[0].widths = std::move(widths);
  return pattern;
}

TEST(SourcePatternTest, ARuleThatSaysItNeedsNoOther) {
  for (const Pattern& rule :
       {Pattern::Shard(0), Pattern::Shard(1), Pattern::Shard(0, {8, 4, 4}), Pattern::Replicate()}) {
    const auto settled = SettlePatterns(rule, false, {16, 4}, Ranks(rule, {16, 4}, 4));
    EXPECT_EQ(settled.pattern, rule);
    EXPECT_FALSE(settled.source);
  }
}

// Six heads of 64 rows on four ranks.
TEST(SourcePatternTest, UnevenHeadsAreKept) {
  const Pattern held = Uneven(0, {}, {128, 128, 64, 64});
  const auto locals = Ranks(held, {384, 8}, 4);
  EXPECT_EQ(locals[2].shape, (Shape{64, 8}));
  auto settled = SettlePatterns(Pattern::Shard(0), false, {384, 8}, locals);
  EXPECT_EQ(settled.source, held);
  EXPECT_EQ(settled.pattern.kind, PatternKind::kUnknown) << "nothing says what a head is";
  Pattern rule = Pattern::Shard(0);
  rule.cuts[0].unit = 64;
  settled = SettlePatterns(rule, true, {384, 8}, locals);
  EXPECT_EQ(settled.source, held);
  EXPECT_EQ(settled.pattern, rule);
  settled = SettlePatterns(Pattern{}, false, {384, 8}, locals);
  EXPECT_EQ(settled.source, held);
  EXPECT_EQ(settled.pattern.kind, PatternKind::kUnknown);
}

TEST(SourcePatternTest, FusedPartsAndRanksWithoutRowsAreKept) {
  const Pattern fused = Uneven(0, {48, 24, 24}, {24, 12, 12, 12, 6, 6, 12, 6, 6});
  auto settled = SettlePatterns(Pattern{}, false, {96, 5}, Ranks(fused, {96, 5}, 3));
  EXPECT_EQ(settled.source, fused);
  const Pattern few = Uneven(1, {}, {6, 6, 0, 0});
  const auto locals = Ranks(few, {5, 12}, 4);
  EXPECT_EQ(locals[3].shape, (Shape{5, 0}));
  settled = SettlePatterns(Pattern::Shard(1), false, {5, 12}, locals);
  EXPECT_EQ(settled.source, few);
}

TEST(SourcePatternTest, AnEvenCutThatNoRuleKnowsIsOneForAllDegrees) {
  const Pattern fused = Pattern::Shard(0, {8, 4, 4});
  const auto settled = SettlePatterns(Pattern{}, false, {16, 2}, Ranks(fused, {16, 2}, 2));
  EXPECT_EQ(settled.pattern, fused);
  EXPECT_FALSE(settled.source);
}

TEST(SourcePatternTest, AnotherPaddingIsTheSourcesOwn) {
  Pattern rule = Pattern::Shard(0);
  rule.cuts[0].pad_multiple = 1;
  const Pattern held = Uneven(0, {}, {256, 256});
  const auto locals = Ranks(held, {499, 2}, 2);
  EXPECT_EQ(locals[1].pieces[0].shape[0], 243u);
  const auto settled = SettlePatterns(rule, false, {499, 2}, locals);
  EXPECT_EQ(settled.pattern, rule);
  EXPECT_EQ(settled.source, held);
}

TEST(SourcePatternTest, WhatIsWholeOnEveryRankIsShownSo) {
  Pattern rule = Pattern::Shard(0);
  rule.cuts[0].pad_multiple = 8;
  const std::vector<LocalTensor> whole(2, WholeTensor({499, 2}));
  const auto settled = SettlePatterns(rule, true, {499, 2}, whole);
  EXPECT_EQ(settled.pattern, rule);
  EXPECT_EQ(settled.source, Pattern::Replicate());
}

// Rows that several ranks hold (shared keys), or blocks of two dims.
TEST(SourcePatternTest, WhatNoPatternSaysIsOpen) {
  std::vector<LocalTensor> shared = Ranks(Pattern::Shard(0), {8, 2}, 2);
  shared[1].pieces[0].atom_begin[0] = 0;
  auto settled = SettlePatterns(Pattern::Shard(0), true, {8, 2}, shared);
  EXPECT_EQ(settled.pattern.kind, PatternKind::kUnknown);
  EXPECT_FALSE(settled.source);
  const Pattern grid{PatternKind::kShard, {Cut{0}, Cut{1}}, {2, 2}, false};
  settled = SettlePatterns(Pattern::Shard(0), true, {4, 4}, Ranks(grid, {4, 4}, 4));
  EXPECT_EQ(settled.pattern.kind, PatternKind::kUnknown);
  EXPECT_FALSE(settled.source);
}

}  // namespace
}  // namespace ckptfs
