// SPDX-License-Identifier: Apache-2.0
#include "core/view/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Parameter Make(std::string name, Shape shape, Pattern pattern, StageRule stage,
               uint32_t layer = 0) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = std::move(shape);
  parameter.pattern = std::move(pattern);
  parameter.stage = stage;
  parameter.layer = layer;
  return parameter;
}

StepModel Model(uint32_t layers) {
  StepModel step;
  step.parameters.push_back(Make("embed", {8, 4}, Pattern::Shard(0), StageRule::kFirst));
  for (uint32_t layer = 0; layer < layers; ++layer) {
    step.parameters.push_back(
        Make(StrCat("layers.", layer, ".w"), {4, 4}, Pattern::Shard(1), StageRule::kLayer, layer));
  }
  step.parameters.push_back(Make("norm", {4}, Pattern::Replicate(), StageRule::kLast));
  step.parameters.push_back(Make("head", {8, 4}, Pattern::Shard(0), StageRule::kLast));
  step.BuildIndex();
  return step;
}

Layout L(std::string_view text) { return *Layout::Parse(text); }

std::string Refusal(const StepModel& step, std::string_view layout) {
  const Status status = CheckLayout(step, L(layout));
  return status ? "accepted" : status.error().message;
}

// "0 0 1 1": the stage of every layer.
std::string Stages(const StepModel& step, std::string_view layout) {
  std::string text;
  for (const Parameter& parameter : step.parameters) {
    if (parameter.stage != StageRule::kLayer) continue;
    auto stage = StageOf(step, L(layout), parameter);
    text += !stage ? "x" : !*stage ? "*" : std::to_string(**stage);
  }
  return text;
}

TEST(ShardTest, SpreadsLayersEvenlyOrAsTheSplitSays) {
  const StepModel step = Model(8);
  EXPECT_EQ(Stages(step, "tp1"), "00000000");
  EXPECT_EQ(Stages(step, "pp2"), "00001111");
  EXPECT_EQ(Stages(step, "pp2_split3-5"), "00011111");
  EXPECT_EQ(Stages(step, "pp3_split0-7-1"), "11111112");
  EXPECT_EQ(Stages(step, "pp2_vpp2"), "00110011");
  EXPECT_EQ(Stages(step, "pp2_vpp2_split1-2-2-3"), "01100111");
}

TEST(ShardTest, RefusesLayersThatDoNotSplit) {
  EXPECT_THAT(Refusal(Model(3), "pp2"), HasSubstr("split2-1"));
  EXPECT_THAT(Refusal(Model(3), "pp2_split2-2"), HasSubstr("4 layers"));
  EXPECT_EQ(Refusal(Model(3), "pp2_split1-2"), "accepted");
  EXPECT_EQ(Refusal(Model(3), "pp3"), "accepted");
  EXPECT_THAT(Refusal(Model(0), "pp2"), HasSubstr("layer number"));
}

TEST(ShardTest, RefusesDegreesThatMakeNoSense) {
  StepModel step = Model(4);
  EXPECT_EQ(Refusal(step, "dp65536"), "accepted");
  EXPECT_THAT(Refusal(step, "dp65537"), HasSubstr("65537 ranks are too many: a step of 1 ranks is "
                                                  "shown for at most 65536"));
  EXPECT_THAT(Refusal(step, "tp2_dp40000"), HasSubstr("80000 ranks"));
  EXPECT_THAT(Refusal(step, "tp16"), HasSubstr("tp16: no dimension of any parameter is above 8"));
  EXPECT_THAT(Refusal(step, "tp4_dp4_etp16"), HasSubstr("etp16"));
  EXPECT_THAT(Refusal(step, "pp7"), HasSubstr("7 pipeline stages: the step has 4 layers"));
  EXPECT_THAT(Refusal(step, "pp2_vpp4"), HasSubstr("8 pipeline stages"));
  EXPECT_EQ(Refusal(step, "pp6_split0-1-1-1-1-0"), "accepted");
  step.layout.dp = 8192;  // a step that large may grow
  EXPECT_EQ(Refusal(step, "dp131072"), "accepted");
  EXPECT_THAT(Refusal(step, "dp131073"), HasSubstr("at most 131072"));
}

TEST(ShardTest, FirstAndLastStageHoldTheEnds) {
  StepModel step = Model(4);
  const Layout layout = L("pp4");
  EXPECT_THAT(*StagesOf(step, layout, step.parameters[0]), ElementsAre(0));
  EXPECT_THAT(*StagesOf(step, layout, step.parameters.back()), ElementsAre(3));
  step.aliases.push_back(Alias{"lm_head", ParameterIndex{0}});
  step.BuildIndex();
  EXPECT_THAT(*StagesOf(step, layout, step.parameters[0]), ElementsAre(0, 3));
  EXPECT_FALSE(*StageOf(step, layout, step.parameters[0]));
  const Parameter copy = step.parameters[0];
  EXPECT_THAT(*StagesOf(step, layout, copy), ElementsAre(0, 3));
  const Parameter every = Make("rope", {2}, Pattern::Replicate(), StageRule::kEvery);
  EXPECT_THAT(*StagesOf(step, layout, every), ElementsAre(0, 1, 2, 3));
  const Parameter tied = Make("t", {2}, Pattern::Replicate(), StageRule::kFirstLast);
  EXPECT_THAT(*StagesOf(step, layout, tied), ElementsAre(0, 3));
}

TEST(ShardTest, EveryLayerIsHeldByExactlyItsStage) {
  const StepModel step = Model(6);
  const Layout layout = L("tp2_pp3_dp2");
  for (uint64_t rank = 0; rank < layout.World(); ++rank) {
    const RankCoordinate at = CoordinateOf(layout, rank);
    for (const Parameter& parameter : step.parameters) {
      if (parameter.stage != StageRule::kLayer) continue;
      EXPECT_EQ(*Holds(step, layout, at, parameter), at.pp == parameter.layer / 2);
    }
  }
}

TEST(ShardTest, LocalTensorsFollowThePattern) {
  const StepModel step = Model(2);
  const Layout layout = L("tp2");
  RankCoordinate rank;
  rank.tp = 1;
  EXPECT_EQ((*LocalOf(step, layout, rank, step.parameters[1]))->shape, (Shape{4, 2}));
  EXPECT_EQ((*LocalOf(step, layout, rank, step.parameters[1]))->pieces[0].atom_begin,
            (std::vector<uint64_t>{0, 2}));
}

TEST(ShardTest, RefusesByNameWhatNoRuleCovers) {
  StepModel step = Model(2);
  for (const char* name : {"a", "b", "c", "d"}) {
    step.parameters.push_back(Make(name, {4}, Pattern{}, StageRule::kEvery));
  }
  step.parameters.push_back(
      Make("u", {4}, Pattern{PatternKind::kUnique, {}, {}, false}, StageRule::kEvery));
  EXPECT_EQ(Refusal(step, "dp4_zero2"), "accepted");
  const std::string message = Refusal(step, "tp2");
  EXPECT_THAT(message, HasSubstr("--family"));
  EXPECT_THAT(message, HasSubstr("'a' and 3 more: no rule")) << "a reason once";
  EXPECT_THAT(message, HasSubstr("'u': only one"));
  const Error error = CheckLayout(step, L("tp2")).error();
  EXPECT_EQ(error.parameter, "a");
  EXPECT_THAT(error.needs, HasSubstr("adopt with --family FILE"));
  EXPECT_THAT(Refusal(Model(2), "tp3"), HasSubstr("'embed'"));
}

TEST(ShardTest, TheSourcesOwnDegreeIsShownAsItsRanksWere) {
  StepModel step = Model(2);
  step.layout = L("tp3_dp2");
  Parameter heads = Make("k", {4, 2}, Pattern{}, StageRule::kEvery);
  heads.source_pattern = Pattern::Shard(0);
  heads.source_pattern->cuts[0].widths = {2, 1, 1};
  step.parameters = {heads};
  for (const char* layout : {"tp3_dp2", "tp3", "dp4"}) EXPECT_EQ(Refusal(step, layout), "accepted");
  EXPECT_THAT(Refusal(step, "tp2"), HasSubstr("'k': its source cut it unevenly over tp3"));
  RankCoordinate rank;
  EXPECT_EQ((*LocalOf(step, L("tp3"), rank, heads))->shape, (Shape{2, 2}));
  rank.tp = 2;
  EXPECT_EQ((*LocalOf(step, L("tp3"), rank, heads))->pieces[0].atom_begin[0], 3u);
  step.parameters[0].pattern = Pattern::Shard(0);
  EXPECT_EQ(Refusal(step, "tp2"), "accepted");
  rank.tp = 1;
  EXPECT_EQ((*LocalOf(step, L("tp2"), rank, step.parameters[0]))->shape, (Shape{2, 2}));
}

TEST(ShardTest, TheSourcesOwnPipelineIsShownAsItsStagesWere) {
  StepModel step = Model(3);
  step.layout = L("pp2_dp2");
  step.parameters = {Make("a", {4}, Pattern::Replicate(), StageRule::kLayer, 2),
                     Make("b", {4}, Pattern::Replicate(), StageRule::kEvery),
                     Make("c", {4}, Pattern::Replicate(), StageRule::kEvery)};
  step.parameters[0].source_stages = {0};
  step.parameters[1].source_stages = {1};
  EXPECT_EQ(Refusal(step, "pp2"), "accepted") << "its own needs no split";
  EXPECT_THAT(*StagesOf(step, L("pp2"), step.parameters[0]), ElementsAre(0));
  EXPECT_THAT(*StagesOf(step, L("pp2_dp4_zero1"), step.parameters[1]), ElementsAre(1));
  EXPECT_THAT(*StagesOf(step, L("pp2"), step.parameters[2]), ElementsAre(0, 1));
  EXPECT_THAT(*StagesOf(step, L("pp2_split2-1"), step.parameters[0]), ElementsAre(1));
  EXPECT_THAT(*StagesOf(step, L("pp3"), step.parameters[1]), ElementsAre(0, 1, 2));
  step.parameters[0].source_stages = {};
  EXPECT_THAT(Refusal(step, "pp2"), HasSubstr("3 layers do not divide by 2 stages"));
}

TEST(ShardTest, NamesTheSizeThatARuleNeeds) {
  StepModel step = Model(2);
  step.family = "mine";
  step.family_rules = R"(
name = "mine"
[[rule]]
match = "open"
pattern = "column"
parts = ["ffn", "ffn"]
[[rule]]
match = "heads"
pattern = "column"
unit = "head_dim"
)";
  step.parameters.push_back(Make("open", {8}, Pattern{}, StageRule::kEvery));
  EXPECT_THAT(Refusal(step, "tp2"),
              HasSubstr("'open': nothing tells ffn, which the rules of family mine need"));
  EXPECT_THAT(CheckLayout(step, L("tp2")).error().needs, HasSubstr("--family-set ffn=NUMBER"));
  step.family_sizes = {{"ffn", 4}};
  EXPECT_THAT(Refusal(step, "tp2"), HasSubstr("'open': no rule"));
  EXPECT_EQ(Refusal(step, "tp2"), Refusal(step, "tp4")) << "one cause at any degree";
  Pattern pattern = Pattern::Shard(0);
  pattern.cuts[0].unit = 8;
  step.parameters.back() = Make("heads", {8}, pattern, StageRule::kEvery);
  const std::string lacks = Refusal(step, "tp2");
  EXPECT_THAT(lacks,
              HasSubstr("'heads': nothing tells head_dim, which the rules of family mine need"));
  pattern.cuts[0].unit = 4;  // of another parameter, and at another degree it is the same
  step.parameters.push_back(Make("heads", {4}, pattern, StageRule::kEvery));
  EXPECT_THAT(Refusal(step, "tp2"), HasSubstr("'heads' and 1 more: nothing tells head_dim"));
  step.parameters.pop_back();
  EXPECT_EQ(Refusal(step, "tp4"), lacks);
  EXPECT_THAT(Refusal(step, "pp3"), testing::Not(HasSubstr("head_dim")));
  step.family_sizes["head_dim"] = 8;
  EXPECT_THAT(Refusal(step, "tp2"), HasSubstr("unit of 8"));
}

StepModel Experts(uint32_t experts) {
  StepModel step = Model(2);
  for (uint32_t e = 0; e < experts; ++e) {
    Parameter expert = Make(StrCat("layers.0.experts.", e, ".w"), {4, 4},
                            Pattern{PatternKind::kUnique, {}, {}, false}, StageRule::kLayer, 0);
    expert.expert = e;
    expert.expert_at = sizeof("layers.0.experts.") - 1;
    step.parameters.push_back(expert);
  }
  step.BuildIndex();
  return step;
}

TEST(ShardTest, ExpertsBelongToTheirExpertRank) {
  const StepModel step = Experts(4);
  const Layout layout = L("dp4_ep2");
  EXPECT_EQ(Refusal(step, "dp4_ep2"), "accepted");
  std::string held;
  for (uint64_t rank = 0; rank < 4; ++rank) {
    for (size_t e = 0; e < 4; ++e) {
      const Parameter& expert = step.parameters[step.parameters.size() - 4 + e];
      if (*Holds(step, layout, CoordinateOf(layout, rank), expert)) held += std::to_string(e);
    }
    held += ' ';
  }
  EXPECT_EQ(held, "01 23 01 23 ");
}

TEST(ShardTest, RefusesExpertLayoutsThatDoNotFit) {
  EXPECT_THAT(Refusal(Experts(3), "dp2_ep2"), HasSubstr("3 experts do not divide"));
  EXPECT_THAT(Refusal(Experts(4), "dp2_etp2"), HasSubstr("etp2"));
  EXPECT_THAT(Refusal(Model(2), "dp2_ep2"), HasSubstr("no experts"));
}

TEST(ShardTest, StackedExpertsAreCutOnDimZero) {
  StepModel step = Model(2);
  Parameter stacked = Make("experts.w1", {4, 2, 3}, Pattern{}, StageRule::kLayer, 1);
  stacked.stacked_experts = 4;
  step.parameters.push_back(stacked);
  EXPECT_EQ(Refusal(step, "tp2_dp2_ep4"), "accepted");
  RankCoordinate rank;
  rank.ep = 2;
  auto local = LocalOf(step, L("dp4_ep4"), rank, stacked);
  ASSERT_TRUE(local);
  EXPECT_EQ((*local)->shape, (Shape{1, 2, 3}));
  EXPECT_EQ((*local)->pieces[0].atom_begin, (std::vector<uint64_t>{2, 0, 0}));
  EXPECT_THAT(Refusal(step, "dp3_ep3"), HasSubstr("4 experts"));
}

TEST(ShardTest, ZeroRangesCoverWithPaddingAtTheEnd) {
  EXPECT_EQ(ZeroRange(10, 0, 4), (std::pair<uint64_t, uint64_t>{0, 3}));
  EXPECT_EQ(ZeroRange(10, 3, 4), (std::pair<uint64_t, uint64_t>{9, 12}));
  EXPECT_EQ(ZeroRange(2, 3, 4), (std::pair<uint64_t, uint64_t>{3, 4}));
  EXPECT_EQ(ZeroRange(0, 1, 4), (std::pair<uint64_t, uint64_t>{0, 0}));
}

}  // namespace
}  // namespace ckptfs
