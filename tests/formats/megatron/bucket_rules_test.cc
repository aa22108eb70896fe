// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"
#include "formats/megatron/buckets/bucket_keys.h"
#include "formats/megatron/buckets/bucket_layout.h"
#include "formats/megatron/buckets/bucket_order.h"
#include "formats/megatron/buckets/rank_parts.h"

namespace ckptfs::megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr const char* kKey =
    "chained_1.optimizer.distributed.dp_group_idx_3.gbuf_idx_2.dtype_(torch.bfloat16, "
    "torch.float32).bucket_idx_1.exp_avg_sq";

TEST(BucketKeysTest, AKeySaysWhatItIsOf) {
  const auto key = BucketKeyOf(kKey);
  ASSERT_TRUE(key.has_value());
  EXPECT_EQ(key->chain, "chained_1.");
  EXPECT_EQ(key->group, 3u);
  EXPECT_EQ(key->buffer, 2u);
  EXPECT_EQ(key->parameters, DType::kBF16);
  EXPECT_EQ(key->bucket, 1u);
  EXPECT_EQ(key->kind, "exp_avg_sq");
  const auto object = GroupObjectKeyOf("optimizer.distributed.dp_group_idx_0.per_bucket_numel");
  ASSERT_TRUE(object.has_value());
  EXPECT_EQ(object->what, "per_bucket_numel");
}

TEST(BucketKeysTest, OtherKeysAreNot) {
  const std::string key = kKey;
  const auto with = [&](const std::string& what, const std::string& by) {
    std::string out = key;
    return out.replace(out.find(what), what.size(), by);
  };
  for (const std::string& other :
       {with("dp_group_idx_3", "dp_group_idx_"), with("dp_group_idx_3", "dp_group_idx_03"),
        with("dp_group_idx_3", "dp_group_idx_4294967296"), with("torch.bfloat16", "torch.float7"),
        with("torch.bfloat16, ", "torch.bfloat16"), with("gbuf_idx_2.", ""),
        with(".exp_avg_sq", "."), with(".exp_avg_sq", ""), with("optimizer.", "optimizer.state."),
        std::string("optimizer.distributed.dp_group_idx_0.param_state"), std::string()}) {
    EXPECT_FALSE(BucketKeyOf(other).has_value()) << other;
  }
  EXPECT_FALSE(GroupObjectKeyOf(kKey).has_value());
  EXPECT_FALSE(GroupObjectKeyOf("optimizer.distributed.dp_group_idx_0.").has_value());
}

// ---- what ranks hold ------------------------------------------------------------------

class RankPartsTest : public testing::Test {
 protected:
  std::vector<std::vector<RankPart>> Parts(const Shape& shape,
                                           std::vector<std::pair<Shape, Shape>> chunks,
                                           const PartsOf& how) {
    dcp::DcpMetadata metadata;
    dcp::TensorEntry tensor{"a", DType::kF32, shape, 0, chunks.size(), 0};
    for (const auto& [offsets, sizes] : chunks) {
      metadata.boxes.insert(metadata.boxes.end(), offsets.begin(), offsets.end());
      metadata.boxes.insert(metadata.boxes.end(), sizes.begin(), sizes.end());
    }
    return RankPartsOf(metadata, tensor, how);
  }
};

TEST_F(RankPartsTest, OneChunkIsEveryRanksAndOthersAreCutsInTheirOrder) {
  const auto whole = Parts({2, 4}, {{{0, 0}, {1, 4}}, {{1, 0}, {1, 4}}}, {true, false, 2});
  ASSERT_EQ(whole.size(), 2u);
  ASSERT_EQ(whole[0].size(), 1u);
  EXPECT_FALSE(whole[0][0].tp.has_value());
  EXPECT_EQ(whole[1][0].boxes[0].begin, (Shape{0}));
  const auto cut = Parts({4, 6}, {{{0, 3}, {4, 3}}, {{0, 0}, {4, 3}}}, {false, false, 2});
  ASSERT_EQ(cut[0].size(), 2u);
  EXPECT_EQ(cut[0][1].tp, 1u);
  EXPECT_EQ(cut[0][1].boxes[0].begin, (Shape{0, 3}));
  EXPECT_EQ(cut[0][1].elements, 12u);
}

TEST_F(RankPartsTest, SectionsThatAreCutEachAreOneAfterTheOther) {
  const auto parts =
      Parts({8, 2}, {{{0, 0}, {2, 2}}, {{2, 0}, {2, 2}}, {{4, 0}, {2, 2}}, {{6, 0}, {2, 2}}},
            {false, false, 2});
  ASSERT_EQ(parts[0].size(), 2u);
  ASSERT_EQ(parts[0][1].boxes.size(), 2u);
  EXPECT_EQ(parts[0][1].boxes[0].begin, (Shape{2, 0}));
  EXPECT_EQ(parts[0][1].boxes[1].begin, (Shape{6, 0}));
}

TEST_F(RankPartsTest, ExpertsAreApart) {
  const auto parts = Parts({1, 2, 4},
                           {{{0, 1, 0}, {1, 1, 2}},
                            {{0, 1, 2}, {1, 1, 2}},
                            {{0, 0, 0}, {1, 1, 2}},
                            {{0, 0, 2}, {1, 1, 2}}},
                           {true, true, 2});
  ASSERT_EQ(parts[0].size(), 4u);
  EXPECT_EQ(parts[0][0].expert, 0u);
  EXPECT_EQ(parts[0][3].expert, 1u);
  EXPECT_EQ(parts[0][3].tp, 1u);
  EXPECT_EQ(parts[0][3].boxes[0].begin, (Shape{1, 2}));
}

TEST_F(RankPartsTest, ChunksOfOtherRanksAreNobodys) {
  // Three of two ranks; of two layers; with a gap; cut along two dimensions; sections of different
  // parts; sections that are not one after the other.
  EXPECT_THAT(Parts({6}, {{{0}, {2}}, {{2}, {2}}, {{4}, {2}}}, {false, false, 2})[0], IsEmpty());
  EXPECT_THAT(Parts({2, 4}, {{{0, 0}, {2, 4}}}, {true, false, 2})[0], IsEmpty());
  EXPECT_THAT(Parts({6}, {{{0}, {2}}, {{4}, {2}}}, {false, false, 2})[0], IsEmpty());
  EXPECT_THAT(Parts({4}, {{{0}, {2}}}, {false, false, 2})[0], IsEmpty());
  EXPECT_THAT(Parts({4, 4}, {{{0, 0}, {2, 2}}, {{2, 2}, {2, 2}}}, {false, false, 2})[0], IsEmpty());
  EXPECT_THAT(Parts({4}, {{{0}, {3}}, {{3}, {1}}}, {false, false, 2})[0], IsEmpty());
  EXPECT_THAT(
      Parts({1, 4}, {{{0, 0}, {1, 1}}, {{0, 1}, {1, 1}}, {{0, 2}, {1, 1}}, {{0, 3}, {1, 1}}},
            {false, false, 2})[0],
      IsEmpty());
}

// ---- where parameters lie -------------------------------------------------------------

// Parameters of 100, 64 and 30 elements: [0, 100) [128, 192) [192, 222), padded to 256 for two
// ranks.
class BucketLayoutTest : public testing::Test {
 protected:
  std::string Refusal() {
    const auto places = PlacesOf(bucket_, sizes_);
    if (!places) return places.error().message;
    auto lie = LieOf(bucket_, *places, ranks_);
    return lie ? "taken" : lie.error().message;
  }

  BucketShape bucket_{222, 256, {0, 100, 128, 192, 222}};
  std::vector<uint64_t> sizes_ = {30, 64, 100};
  std::optional<uint64_t> ranks_ = 2;
};

TEST_F(BucketLayoutTest, ParametersBeginAtMultiplesOf64) {
  const auto places = PlacesOf(bucket_, sizes_);
  ASSERT_TRUE(places.has_value());
  const auto lie = LieOf(bucket_, *places, ranks_);
  ASSERT_TRUE(lie.has_value()) << lie.error().message;
  EXPECT_THAT(*lie, ElementsAre(BucketPlace{0, 100}, BucketPlace{128, 64}, BucketPlace{192, 30}));
}

TEST_F(BucketLayoutTest, ASharesBorderMayLieInAParameter) {
  bucket_ = {222, 384, {0, 96, 100, 128, 192, 222}};
  ranks_ = 4;  // of 96 elements: [192, ...) is a border of both
  EXPECT_EQ(Refusal(), "taken");
  ranks_ = 8;  // instances of four ranks have the same
  EXPECT_EQ(Refusal(), "taken");
  ranks_ = 3;
  EXPECT_THAT(Refusal(), HasSubstr("neither a parameter nor a rank's share"));
  ranks_.reset();
  EXPECT_EQ(Refusal(), "taken");
}

TEST_F(BucketLayoutTest, ABucketMayEndInAPadding) {
  const std::vector<BucketPlace> places = {{0, 100}, {128, 64}, {192, 30}};
  bucket_.elements = 256;
  bucket_.borders = {0, 100, 128, 192, 222, 256};
  EXPECT_TRUE(LieOf(bucket_, places, ranks_).has_value());
  bucket_.elements = bucket_.borders.back() = 240;
  EXPECT_THAT(LieOf(bucket_, places, ranks_).error().message,
              HasSubstr("ends at element 240, within a padding"));
}

TEST_F(BucketLayoutTest, WhatIsShiftedByOneIsNotABucket) {
  for (size_t i = 1; i + 1 < bucket_.borders.size(); ++i) {
    ++bucket_.borders[i];
    EXPECT_NE(Refusal(), "taken") << i;
    bucket_.borders[i] -= 2;
    EXPECT_NE(Refusal(), "taken") << i;
    ++bucket_.borders[i];
  }
  EXPECT_EQ(Refusal(), "taken");
}

TEST_F(BucketLayoutTest, ATruncatedBucketIsNot) {
  bucket_.elements = bucket_.borders.back() = 221;
  EXPECT_THAT(Refusal(), HasSubstr("at element 192 no parameter"));
  bucket_.elements = 192;
  bucket_.borders.pop_back();
  EXPECT_EQ(Refusal(), "taken");  // the stored size is compared elsewhere
}

TEST_F(BucketLayoutTest, ABorderThatNobodyHasIsRefused) {
  bucket_.borders = {0, 64, 100, 128, 192, 222};
  EXPECT_THAT(Refusal(), HasSubstr("at element 0 parameters of several sizes"));
  sizes_ = {30, 100};
  EXPECT_THAT(Refusal(), HasSubstr("at element 128 no parameter"));
  sizes_ = {30, 64, 100};
  bucket_.borders = {0, 50, 100, 128, 192, 222};
  EXPECT_THAT(Refusal(), HasSubstr("a rank's share begins, at element 50"));
}

TEST_F(BucketLayoutTest, ManySizesTakeNoTime) {
  bucket_ = {uint64_t{1} << 40, uint64_t{1} << 40, {}};
  sizes_.clear();
  for (uint64_t i = 0; i < (1 << 15); ++i) {
    bucket_.borders.push_back(i * 64);
    sizes_.push_back(i + 1);
  }
  bucket_.borders.push_back(bucket_.elements);
  EXPECT_THAT(Refusal(), HasSubstr("too many to be tried"));
  sizes_.resize(1024);
  EXPECT_THAT(Refusal(), HasSubstr("more than 8 sizes may begin at element 0"));
}

// ---- whose they are -------------------------------------------------------------------

// Two layers of names 1 (a norm), 2 and 3 on each of two stages, behind an embedding (0) and before
// a norm (4).  A parameter's values are 10 * layer + name, but for what a test changes.
class BucketOrderTest : public testing::Test {
 protected:
  BucketOrderTest() : ranks_(2) {
    for (auto& rank : ranks_) {
      rank.push_back({0, {}, 0});
      for (uint32_t layer = 0; layer < 4; ++layer) {
        for (const uint32_t name : {3, 2, 1}) rank.push_back({name, layer, 10 * layer + name});
      }
      rank.push_back({4, {}, 4});
    }
    for (uint32_t stage = 0; stage < 2; ++stage) {
      for (uint32_t rank = 0; rank < 2; ++rank) buffers_.push_back({rank, stage, {}});
    }
  }
  // Where the parameter of a layer is in `ranks_`.
  static uint32_t At(uint32_t layer, uint32_t name) { return 1 + 3 * layer + (3 - name); }

  std::string Decide() {
    for (OrderedBuffer& buffer : buffers_) {
      if (!buffer.places.empty()) continue;
      const auto& rank = ranks_[buffer.rank];
      if (buffer.line == 0) buffer.places.push_back(rank.front().values);
      for (uint32_t layer = 2 * buffer.line; layer < 2 * buffer.line + 2; ++layer) {
        for (const uint32_t name : {1, 2, 3}) {
          buffer.places.push_back(rank[At(layer, name)].values);
        }
      }
      if (buffer.line == 1) buffer.places.push_back(rank.back().values);
    }
    auto decided = DecideOrder(ranks_, buffers_, [&](uint32_t rank, uint32_t parameter) {
      const OrderedParameter& one = ranks_[rank][parameter];
      return StrCat(one.name, ".", one.layer ? static_cast<int>(*one.layer) : -1);
    });
    if (!decided) return decided.error().message;
    std::string out;
    for (const uint32_t owner : (*decided)[0]) out += StrCat(" ", owner);
    return out;
  }

  std::vector<std::vector<OrderedParameter>> ranks_;
  std::vector<OrderedBuffer> buffers_;
};

constexpr const char* kTrue = " 0 3 2 1 6 5 4";

TEST_F(BucketOrderTest, ValuesThatOneParameterHasDecide) { EXPECT_EQ(Decide(), kTrue); }

TEST_F(BucketOrderTest, WhatAnotherStageHasDoesNotCount) {
  for (auto& rank : ranks_) {
    for (const uint32_t name : {1, 2}) rank[At(2, name)].values = rank[At(0, name)].values;
  }
  EXPECT_EQ(Decide(), kTrue);
}

TEST_F(BucketOrderTest, AnotherLayerTellsWhatOneDoesNot) {
  ranks_[0][At(0, 1)].values = ranks_[0][At(1, 1)].values = ranks_[0][At(1, 2)].values = 99;
  EXPECT_EQ(Decide(), kTrue);
}

TEST_F(BucketOrderTest, ParametersThatAreAlikeInEveryLayerAreNotTold) {
  for (auto& rank : ranks_) {
    for (uint32_t layer = 0; layer < 4; ++layer) {
      rank[At(layer, 1)].values = rank[At(layer, 2)].values = 99;
    }
  }
  EXPECT_THAT(Decide(), HasSubstr("and others have the same values"));
}

TEST_F(BucketOrderTest, TwoOfZerosAreNotTold) {
  ranks_[0][At(0, 1)].values = ranks_[0][At(0, 2)].values = 99;
  ranks_[0][At(1, 1)].values = ranks_[0][At(1, 2)].values = 98;
  ranks_.pop_back();
  buffers_ = {buffers_[0]};
  EXPECT_THAT(Decide(), HasSubstr("'2.0' and '1.0' have the same values"));
}

TEST_F(BucketOrderTest, WithoutALayerTheLastOneIsTold) {
  ranks_[0].back().values = ranks_[0][At(3, 1)].values;
  EXPECT_EQ(Decide(), kTrue);
  ranks_[0].push_back({5, {}, ranks_[0].back().values});
  EXPECT_THAT(Decide(), HasSubstr("and others have the same values"));
}

TEST_F(BucketOrderTest, SwappedParametersContradictTheOrder) {
  Decide();
  std::swap(buffers_[0].places[1], buffers_[0].places[2]);  // in one layer
  EXPECT_THAT(Decide(), HasSubstr("does not stand where it stands in other layers"));
  std::swap(buffers_[0].places[1], buffers_[0].places[2]);
  std::swap(buffers_[0].places[2], buffers_[0].places[5]);  // of two layers
  EXPECT_THAT(Decide(), HasSubstr("does not stand where it stands in other layers"));
  std::swap(buffers_[0].places[2], buffers_[0].places[5]);
  std::swap(buffers_[0].places[0], buffers_[2].places[6]);  // of two stages of one rank
  EXPECT_THAT(Decide(), HasSubstr("another one that divides the same tensors"));
  std::swap(buffers_[0].places[0], buffers_[2].places[6]);
  for (size_t i = 1; i < 4; ++i) std::swap(buffers_[0].places[i], buffers_[0].places[i + 3]);
  EXPECT_THAT(Decide(), HasSubstr("stands behind a later layer"));
  for (size_t i = 1; i < 4; ++i) std::swap(buffers_[0].places[i], buffers_[0].places[i + 3]);
  for (size_t i = 1; i < 4; ++i) std::swap(buffers_[0].places[i], buffers_[2].places[i]);
  EXPECT_NE(Decide(), kTrue);
}

TEST_F(BucketOrderTest, ALayerOfTwoBuffersIsRefused) {
  Decide();
  buffers_[2].places.push_back(buffers_[0].places[1]);
  EXPECT_THAT(Decide(), HasSubstr("lies in two buffers"));
}

TEST_F(BucketOrderTest, RanksOfDifferentNumbersOfParametersAreRefused) {
  Decide();
  buffers_[1].places.pop_back();
  EXPECT_NE(Decide(), kTrue);
}

// All alike: the time depends on the number alone.
TEST_F(BucketOrderTest, ManyThatAreAlikeTakeNoTime) {
  ranks_ = {{}};
  buffers_ = {{0, 0, std::vector<uint32_t>(200000, 7)}};
  for (uint32_t i = 0; i < 200000; ++i) ranks_[0].push_back({i % 500, i / 500, 7});
  EXPECT_THAT(Decide(), HasSubstr("have the same values"));
}

}  // namespace
}  // namespace ckptfs::megatron
