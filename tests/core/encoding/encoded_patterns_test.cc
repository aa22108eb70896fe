// SPDX-License-Identifier: Apache-2.0

#include "core/encoding/encoded_patterns.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>

namespace ckptfs {
namespace {

using Index = std::vector<uint64_t>;

// Indexes of the atom by index of the local tensor.
std::map<Index, Index> Expand(const LocalTensor& local) {
  std::map<Index, Index> out;
  const auto strides = RowMajorStrides(local.shape);
  for (const Piece& piece : local.pieces) {
    for (uint64_t i = 0; i < *ElementCount(piece.shape); ++i) {
      Index atom(piece.shape.size());
      uint64_t rest = i, flat = piece.local_offset;
      for (size_t d = piece.shape.size(); d-- > 0;) {
        flat += rest % piece.shape[d] * piece.local_strides[d];
        atom[d] = piece.atom_begin[d] + rest % piece.shape[d];
        rest /= piece.shape[d];
      }
      Index at;
      for (const uint64_t stride : strides) {
        at.push_back(flat / stride);
        flat %= stride;
      }
      out.emplace(at, atom);
    }
  }
  return out;
}

Index InBlocks(Index index, const ScaleBlock& block) {
  index[index.size() - 2] /= block.rows;
  index.back() /= block.columns;
  return index;
}

// A rank that finds the scale of what it holds by its own indexes finds the one of the whole.
TEST(EncodedPatternsTest, ARankHasTheScalesOfItsValues) {
  std::mt19937_64 random(1);
  const auto pick = [&](uint64_t n) { return random() % n; };
  int cut = 0, refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const EncodingConfig config{EncodingMethod::kFp8, {1 + pick(4), 1 + pick(4)}};
    const uint32_t dim = static_cast<uint32_t>(pick(2));
    Pattern pattern = Pattern::Shard(dim);
    Shape shape = {1 + pick(24), 1 + pick(24)};
    if (pick(3) == 0) {
      pattern.cuts[0].parts = {1 + pick(12), 1 + pick(12), 1 + pick(12)};
      shape[dim] =
          std::accumulate(pattern.cuts[0].parts.begin(), pattern.cuts[0].parts.end(), uint64_t{0});
    }
    pattern.cuts[0].unit = 1 + pick(3);
    const uint64_t degree = 1 + pick(4), rank = pick(degree);
    const Shape blocks = InBlocks(
        {shape[0] + config.block.rows - 1, shape[1] + config.block.columns - 1}, config.block);
    const auto values =
        MakeLocal(StoredPattern(pattern, DimsOfValues(config, 2)), shape, rank, degree);
    const auto scales =
        MakeLocal(StoredPattern(pattern, DimsOfScales(config, 2)), blocks, rank, degree);
    if (!values || !scales) {
      ++refused;
      continue;
    }
    cut += degree > 1 ? 1 : 0;
    const auto held = Expand(*scales);
    for (const auto& [local, atom] : Expand(*values)) {
      const auto scale = held.find(InBlocks(local, config.block));
      ASSERT_NE(scale, held.end());
      ASSERT_EQ(scale->second, InBlocks(atom, config.block));
    }
    // And it is as the family cuts the decoded tensor.
    if (degree > 1) {
      EXPECT_EQ(*values, *MakeLocal(pattern, shape, rank, degree));
    }
  }
  EXPECT_GT(cut, 500);
  EXPECT_GT(refused, 500);
}

TEST(EncodedPatternsTest, WhatHasNoBlocksIsCutAsItIs) {
  const EncodingConfig mxfp4{EncodingMethod::kMxfp4, kMxfp4Block};
  // [experts, columns, rows] lies as [experts, rows, columns / 32, 16].
  const Pattern rows = StoredPattern(Pattern::Shard(2), DimsOfValues(mxfp4, 3));
  EXPECT_EQ(rows, Pattern::Shard(1));
  EXPECT_EQ(StoredPattern(Pattern::Shard(2), DimsOfScales(mxfp4, 3)), Pattern::Shard(1));
  Pattern columns = StoredPattern(Pattern::Shard(1), DimsOfValues(mxfp4, 3));
  EXPECT_EQ(columns, Pattern::Shard(2));
  EXPECT_TRUE(MakeLocal(columns, {4, 6, 2, 16}, 0, 2));
  EXPECT_FALSE(MakeLocal(columns, {4, 6, 3, 16}, 0, 2));  // 48 of 96 columns: within a block
  EXPECT_EQ(StoredPattern(Pattern::Replicate(), DimsOfValues(mxfp4, 3)), Pattern::Replicate());
}

TEST(EncodedPatternsTest, WhatWouldGoThroughABlockIsNotCut) {
  const EncodingConfig fp8{EncodingMethod::kFp8, {4, 4}};
  const auto kind = [&](const Pattern& pattern) {
    return StoredPattern(pattern, DimsOfValues(fp8, 2)).kind;
  };
  EXPECT_EQ(kind(Pattern::Shard(0)), PatternKind::kShard);
  EXPECT_EQ(kind(Pattern::Shard(0, {4, 6})), PatternKind::kUnknown);
  EXPECT_EQ(kind(Pattern::Shard(5)), PatternKind::kUnknown);
  Pattern padded = Pattern::Shard(0);
  padded.cuts[0].pad_multiple = 8;
  EXPECT_EQ(kind(padded), PatternKind::kUnknown);
  Pattern open = Pattern::Shard(1);
  open.cuts[0].unit = 0;
  EXPECT_EQ(kind(open), PatternKind::kUnknown);
}

}  // namespace
}  // namespace ckptfs
