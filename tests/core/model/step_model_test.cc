// SPDX-License-Identifier: Apache-2.0
#include "core/model/step_model.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

Parameter Named(std::string name) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = {2};
  return parameter;
}

StepModel Small() {
  StepModel model;
  model.parameters = {Named("embed"), Named("head")};
  for (uint32_t p : {0u, 1u}) {
    for (const char* kind : {"master", "exp_avg"}) {
      Atom atom;
      atom.parameter = ParameterIndex{p};
      atom.kind = kind;
      model.atoms.push_back(atom);
    }
  }
  model.aliases = {Alias{"lm_head", ParameterIndex{0}}};
  model.documents.resize(2);
  model.documents[0].key = "args";
  model.documents[1].key = "args";
  model.documents[1].scope = "dp1";
  return model;
}

void ExpectLookups(const StepModel& model) {
  EXPECT_EQ(model.FindParameter("head"), ParameterIndex{1});
  EXPECT_EQ(model.FindParameter("lm_head"), ParameterIndex{0});
  EXPECT_FALSE(model.FindParameter("none"));
  EXPECT_EQ(model.FindAtom(ParameterIndex{1}, "exp_avg"), AtomIndex{3});
  EXPECT_FALSE(model.FindAtom(ParameterIndex{1}, "weight"));
  EXPECT_FALSE(model.FindAtom(ParameterIndex{7}, "master"));
  EXPECT_EQ(model.FindDocument("args"), &model.documents[0]);
  EXPECT_EQ(model.FindDocument("args", "dp1"), &model.documents[1]);
  EXPECT_EQ(model.FindDocument("args", "dp2"), nullptr);
  EXPECT_TRUE(model.IsTied(ParameterIndex{0}));
  EXPECT_FALSE(model.IsTied(ParameterIndex{1}));
}

TEST(StepModelTest, LooksUpWithAndWithoutAnIndex) {
  StepModel model = Small();
  ExpectLookups(model);
  model.BuildIndex();
  ExpectLookups(model);
}

TEST(StepModelTest, AnIndexOfOtherSizesIsNotUsed) {
  StepModel model = Small();
  model.BuildIndex();
  model.parameters.push_back(Named("late"));
  EXPECT_EQ(model.FindParameter("late"), ParameterIndex{2});
}

Parameter Expert(const std::string& before, uint32_t id, const std::string& after) {
  Parameter parameter = Named(before + std::to_string(id) + after);
  parameter.expert = id;
  parameter.expert_at = static_cast<uint32_t>(before.size());
  return parameter;
}

TEST(StepModelTest, CountsTheExpertsOfAGroup) {
  StepModel model;
  for (uint32_t layer : {0u, 3u}) {
    for (uint32_t expert = 0; expert < (layer == 0 ? 2u : 4u); ++expert) {
      model.parameters.push_back(
          Expert("layers." + std::to_string(layer) + ".experts.", expert, ".w3.weight"));
    }
  }
  model.parameters.push_back(Expert("fc1.weight", 1, ""));
  for (int pass = 0; pass < 2; ++pass) {
    EXPECT_EQ(model.ExpertsOf(model.parameters[0]), 2u);
    EXPECT_EQ(model.ExpertsOf(model.parameters[5]), 4u);  // layer 3, expert 3, w3
    EXPECT_EQ(model.ExpertsOf(model.parameters[6]), 2u);
    EXPECT_EQ(model.ExpertsOf(Named("dense")), 0u);
    model.BuildIndex();
  }
}

// Experts that are nn.Sequential: their children's numbers are not an experts'.
TEST(StepModelTest, NumbersBehindTheExpertAreNotItsId) {
  StepModel model;
  for (uint32_t expert = 0; expert < 8; ++expert) {
    for (const char* child : {".1.weight", ".3.weight"}) {
      model.parameters.push_back(Expert("layers.1.deepspeed_experts.", expert, child));
    }
  }
  for (int pass = 0; pass < 2; ++pass) {
    for (const Parameter& parameter : model.parameters) EXPECT_EQ(model.ExpertsOf(parameter), 8u);
    model.BuildIndex();
  }
}

TEST(StepModelTest, RenamesAnExpertWhereItsIdStands) {
  const Parameter expert = Expert("layers.1.experts.", 11, ".11.weight");
  EXPECT_TRUE(NamesItsExpert(expert));
  EXPECT_EQ(WithExpert(expert, expert.name, 2), "layers.1.experts.2.11.weight");
  EXPECT_EQ(WithExpert(expert, "2.experts.11.11.weight", 0), "2.experts.0.11.weight");
  EXPECT_EQ(WithExpert(expert, "2.experts.11.1.weight", 0), "");
  Parameter wrong = expert;
  wrong.expert_at += 1;
  EXPECT_FALSE(NamesItsExpert(wrong));
  wrong.expert_at = 1000;
  EXPECT_FALSE(NamesItsExpert(wrong));
}

TEST(StepModelTest, CountsLayers) {
  StepModel model;
  EXPECT_EQ(model.LayerCount(), 0u);
  Parameter parameter = Named("layers.4.w");
  parameter.stage = StageRule::kLayer;
  parameter.layer = 4;
  model.parameters.push_back(parameter);
  EXPECT_EQ(model.LayerCount(), 5u);
  model.BuildIndex();
  EXPECT_EQ(model.LayerCount(), 5u);
  model.layers = 8;
  EXPECT_EQ(model.LayerCount(), 8u);
}

}  // namespace
}  // namespace ckptfs
