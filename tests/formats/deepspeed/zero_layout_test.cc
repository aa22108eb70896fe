// SPDX-License-Identifier: Apache-2.0
#include "formats/deepspeed/zero_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/model_states.h"
#include "formats/deepspeed/names.h"

namespace ckptfs::deepspeed {
namespace {

// Element by element, as stage_1_and_2.py flattens and cuts a group.
TEST(ZeroLayoutTest, FlatMembersAgreeWithTheirDefinition) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const uint64_t start = random() % 90;
    const uint64_t elements = random() % 30;
    const uint64_t partition = random() % 40 + 1;
    uint64_t next = 0;
    ASSERT_TRUE(VisitFlatMember(start, elements, partition, [&](const ZeroSpan& span) {
      EXPECT_EQ(span.begin, next);
      for (uint64_t e = span.begin; e < span.end; ++e) {
        EXPECT_EQ((start + e) / partition, span.rank);
        EXPECT_EQ((start + e) % partition, span.at + (e - span.begin));
      }
      next = span.end;
      return Status();
    }));
    EXPECT_EQ(next, elements);
  }
}

TEST(ZeroLayoutTest, SlicesAgreeWithTheirDefinition) {
  for (uint32_t ranks = 1; ranks < 9; ++ranks) {
    for (const uint64_t elements : {1, 7, 0, 8, 100}) {
      uint64_t covered = 0;
      ASSERT_TRUE(VisitSlices(elements, ranks, 11, [&](const ZeroSpan& span) {
        EXPECT_EQ(span.at, 11u);
        EXPECT_EQ(span.begin, span.rank * ((elements + ranks - 1) / ranks));
        EXPECT_EQ(span.begin, covered);
        covered = span.end;
        return Status();
      }));
      EXPECT_EQ(covered, elements);
    }
  }
}

TEST(NamesTest, NumbersAreNumbers) {
  StepFiles files;
  for (int mp : {2, 10, 100, 11}) {
    ASSERT_TRUE(ClassifyFile("mp_rank_" + std::to_string(mp) + "_model_states.pt", files));
  }
  std::vector<uint32_t> order;
  for (const auto& [mp, name] : files.model) order.push_back(mp);
  EXPECT_THAT(order, testing::ElementsAre(2, 10, 11, 100));
}

TEST(NamesTest, TwoFilesOfOneRankAreRefused) {
  StepFiles files;
  ASSERT_TRUE(ClassifyFile("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", files));
  EXPECT_FALSE(ClassifyFile("zero_pp_rank_0_mp_rank_00_optim_states.pt", files));
  ASSERT_TRUE(ClassifyFile("mp_rank_00_model_states.pt", files));
  EXPECT_FALSE(ClassifyFile("mp_rank_0_model_states.pt", files));
}

TEST(NamesTest, EveryKindIsRecognised) {
  StepFiles files;
  for (const char* name :
       {"layer_03-model_01-model_states.pt", "layer_7-model_states.pt",
        "layer_0_expert_12_mp_rank_00_model_states.pt", "expp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_3_mp_rank_01_model_states.pt", "readme.txt", "mp_rank_xx_model_states.pt"}) {
    ASSERT_TRUE(ClassifyFile(name, files)) << name;
  }
  EXPECT_EQ(files.layers.size(), 2u);
  EXPECT_EQ(files.experts.begin()->first.expert, 12u);
  EXPECT_EQ(files.expert_optimizer.size(), 1u);
  EXPECT_EQ(files.stage3_model.begin()->first.dp, 3u);
  EXPECT_TRUE(files.model.empty() && files.optimizer.empty());
  EXPECT_EQ(IterationOfTag("global_step1200"), 1200u);
  EXPECT_EQ(IterationOfTag("best"), 0u);
}

TEST(ExpertNamesTest, LocalNumbersBecomeGlobal) {
  // Two groups of one rank: a large expert group is split.
  const std::vector<std::vector<NamedShape>> groups{{{"l.0.deepspeed_experts.0.w", {2}}},
                                                    {{"l.0.deepspeed_experts.1.w", {2}}}};
  const LocalExperts experts(groups);
  EXPECT_EQ(*experts.Global("l.0.deepspeed_experts.1.w", 3), "l.0.deepspeed_experts.7.w");
  EXPECT_EQ(*experts.Global("l.0.deepspeed_experts.0.w", 3), "l.0.deepspeed_experts.6.w");
  EXPECT_FALSE(experts.Global("l.0.gate.w", 0));
  const auto expert = ExpertOf("5.deepspeed_experts.5.5.w");
  ASSERT_TRUE(expert);
  EXPECT_EQ(expert->number, 5u);
  EXPECT_EQ(expert->at, 20u);
  EXPECT_FALSE(ExpertOf("a.deepspeed_experts.x.w"));
}

}  // namespace
}  // namespace ckptfs::deepspeed
