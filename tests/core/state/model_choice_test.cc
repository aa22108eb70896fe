// SPDX-License-Identifier: Apache-2.0

#include "core/state/model_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using Tensor = ModelCandidate::Tensor;

// The state_dict() of two layers, saved as a plain dict.
ModelCandidate Module(std::string key) {
  ModelCandidate out;
  out.key = std::move(key);
  out.tensors = {{"0.weight", DType::kF32, {8, 4}},
                 {"0.bias", DType::kF32, {8}},
                 {"1.weight", DType::kF32, {4, 8}},
                 {"1.seen", DType::kI64, {}}};
  return out;
}

ModelCandidate Stray(std::string key, std::vector<Tensor> tensors, size_t others = 5) {
  ModelCandidate out;
  out.key = std::move(key);
  out.tensors = std::move(tensors);
  out.others = others;
  return out;
}

// The key that is chosen, or why none is.
std::string Chosen(const std::vector<ModelCandidate>& candidates, std::string_view asked = "") {
  const auto choice = ChooseModel(candidates, asked);
  return choice ? StrCat("<", candidates[choice->index].key, ">") : choice.error().message;
}

TEST(ModelChoiceTest, WhateverTheDictIsCalledItIsTheModel) {
  for (const char* key :
       {"", "model", "net", "params", "generator", "transformer", "a.b.c", "ema"}) {
    EXPECT_EQ(Chosen({Module(key)}), StrCat("<", key, ">"));
  }
}

TEST(ModelChoiceTest, StrayTensorsAreNeverTheModelBesideOne) {
  const std::vector<std::vector<Tensor>> strays = {
      {{"best_val_loss", DType::kF32, {}}},
      {{"rng_state", DType::kU8, {5056}}},
      {{"class_weights", DType::kF32, {10}}},
      {{"prototypes", DType::kF32, {10, 16}}},
      {{"val.loss", DType::kF32, {1}}},
      {{"a", DType::kF32, {}}, {"b", DType::kF32, {}}, {"c", DType::kF32, {}}}};
  for (const auto& tensors : strays) {
    for (const char* key : {"model", "net", "anything", "ema"}) {
      EXPECT_EQ(Chosen({Stray("", tensors), Module(key)}), StrCat("<", key, ">"))
          << tensors[0].name;
    }
  }
  // Counts decide nothing: of many losses none is a parameter.
  std::vector<Tensor> losses;
  for (int i = 0; i < 100; ++i) losses.push_back({StrCat("loss.", i), DType::kF32, {}});
  EXPECT_EQ(Chosen({Stray("best", losses, 0), Module("net")}), "<net>");
}

TEST(ModelChoiceTest, WithoutAModelNumbersAreNotOne) {
  EXPECT_THAT(Chosen({Stray("", {{"best", DType::kF32, {}}})}),
              HasSubstr("not hold a dict of named tensors"));
  EXPECT_THAT(Chosen({Stray("", {{"rng", DType::kU8, {5056}}})}),
              HasSubstr("not hold a dict of named tensors"));
  EXPECT_THAT(Chosen({Stray("metrics", {{"loss", DType::kF32, {}}}, 0)}),
              HasSubstr("not hold a dict of named tensors"));
  EXPECT_THAT(Chosen({}), HasSubstr("not hold a dict of named tensors"));
  EXPECT_EQ(Chosen({Stray("", {{"scale", DType::kF32, {}}}, 0)}), "<>");  // a file of one parameter
  EXPECT_EQ(Chosen({Stray("", {{"w", DType::kF32, {3, 4}}})}), "<>");
}

TEST(ModelChoiceTest, ModulesOfEqualRankAreRefusedByName) {
  const auto choice = ChooseModel(std::vector{Module("generator"), Module("discriminator")}, "");
  ASSERT_FALSE(choice);
  EXPECT_THAT(choice.error().message, HasSubstr("'generator', 'discriminator'"));
  EXPECT_THAT(choice.error().message, HasSubstr("--model KEY"));
  EXPECT_EQ(choice.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(Chosen({Module("left.model"), Module("right.model")}),
              HasSubstr("'left.model', 'right.model'"));
  EXPECT_THAT(Chosen({Module("ema"), Module("teacher")}), HasSubstr("'ema', 'teacher'"));
  // A word for a model deep in something else is not one for the model.
  EXPECT_THAT(Chosen({Module("actor"), Module("critic"), Module("loss.model")}),
              HasSubstr("'actor', 'critic'"));
}

TEST(ModelChoiceTest, WordsBreakTiesWithAReason) {
  const auto choice = ChooseModel(std::vector{Module("state_dict_ema"), Module("state_dict")}, "");
  ASSERT_TRUE(choice);
  EXPECT_EQ(choice->index, 1u);
  EXPECT_EQ(choice->why, "'state_dict_ema' is by its name an average, a loss or an optimizer's");
  EXPECT_THAT(choice->others, ElementsAre(0));
  EXPECT_EQ(Chosen({Module("student"), Module("teacher")}), "<student>");
  EXPECT_EQ(Chosen({Module("student"), Module("teacher"), Module("dino_loss")}), "<student>");
  EXPECT_EQ(Chosen({Module("criterion"), Module("net_g")}), "<net_g>");
  EXPECT_EQ(Chosen({Module("optim.exp_avg"), Module("net_g")}), "<net_g>");
  EXPECT_EQ(Chosen({Module("discriminator"), Module("model")}), "<model>");
  EXPECT_EQ(Chosen({Module("app.model"), Module("app.EMA")}), "<app.model>");
  EXPECT_THAT(Chosen({Module(""), Module("critic")}), HasSubstr("'.' (the top), 'critic'"));
}

TEST(ModelChoiceTest, NamesInAnOptimizerBeatWords) {
  ModelCandidate trained = Module("critic");
  trained.trained = 4;
  EXPECT_EQ(Chosen({Module("model"), trained}), "<critic>");
  ModelCandidate part = Module("inner");
  part.made = ModelCandidate::Made::kDerived;
  EXPECT_EQ(Chosen({Module("odd"), part}), "<odd>");
  part.trained = 4;
  EXPECT_EQ(Chosen({Module("odd"), part}), "<inner>");
}

// In a state that its script flattened, "model" may be a module of the model.
TEST(ModelChoiceTest, FirstWordsOfFlatKeysBreakNoTie) {
  const auto split = [](const char* key) {
    ModelCandidate out = Module(key);
    out.made = ModelCandidate::Made::kSplit;
    return out;
  };
  EXPECT_THAT(Chosen({split("model"), split("lm_head")}), HasSubstr("'model', 'lm_head'"));
  EXPECT_EQ(Chosen({split("model"), split("ema")}), "<model>");
}

// A model at the top of a state, beside more other values than it has parameters.
TEST(ModelChoiceTest, ASmallModelAtTheTopIsOne) {
  ModelCandidate top = Module("");
  top.others = 9;
  EXPECT_EQ(Chosen({Module("ema"), top}), "<>");
}

TEST(ModelChoiceTest, TheUsersWordIsTaken) {
  const std::vector<ModelCandidate> both = {Module("generator"), Module("discriminator"),
                                            Stray("", {{"best", DType::kF32, {}}})};
  EXPECT_EQ(Chosen(both, "discriminator"), "<discriminator>");
  EXPECT_EQ(Chosen(both, "discriminator."), "<discriminator>");
  EXPECT_EQ(Chosen(both, "."), "<>");
  const auto choice = ChooseModel(both, "generator");
  ASSERT_TRUE(choice);
  EXPECT_THAT(choice->others, ElementsAre(1));
  const std::string refused = Chosen(both, "ganerator");
  EXPECT_THAT(refused, HasSubstr("--model ganerator"));
  EXPECT_THAT(refused, HasSubstr("'generator', 'discriminator'"));
  EXPECT_THAT(refused, Not(HasSubstr("top")));
}

TEST(ModelChoiceTest, AModuleOfVectorsIsToldByTorchsMark) {
  ModelCandidate norm =
      Stray("norm", {{"weight", DType::kF32, {8}}, {"bias", DType::kF32, {8}}}, 0);
  norm.marked = true;
  EXPECT_EQ(
      Chosen({Stray("stats", {{"mean", DType::kF32, {8}}, {"std", DType::kF32, {8}}}, 0), norm}),
      "<norm>");
}

TEST(ModelChoiceTest, AnAverageIsKnownByItsCounter) {
  using Named = ModelCandidate::Tensor;
  const Named weight{"module.0.weight", DType::kF32, {2, 2}};
  for (const char* counter : {"n_averaged", "steps"}) {
    EXPECT_TRUE(IsAverageState(std::vector<Named>{{counter, DType::kI64, {}}, weight}));
    EXPECT_FALSE(IsAverageState(std::vector<Named>{{counter, DType::kI64, {}}}));
    EXPECT_FALSE(IsAverageState(std::vector<Named>{{counter, DType::kF32, {}}, weight}));
    EXPECT_FALSE(IsAverageState(std::vector<Named>{{counter, DType::kI64, {1}}, weight}));
    EXPECT_FALSE(IsAverageState(
        std::vector<Named>{{counter, DType::kI64, {}}, {"0.weight", DType::kF32, {2, 2}}}));
  }
  EXPECT_FALSE(IsAverageState(std::vector<Named>{weight}));
  EXPECT_FALSE(IsAverageState({}));
}

TEST(ModelChoiceTest, KeysOfOptimizersAreKnown) {
  EXPECT_EQ(OptimizerPrefixOf("optim.state.a.weight.exp_avg"), "optim.");
  EXPECT_EQ(OptimizerPrefixOf("app.optimizers.muon.param_groups.0.lr"), "app.optimizers.muon.");
  EXPECT_EQ(OptimizerPrefixOf("model.state.weight"), "");
  EXPECT_EQ(OptimizerPrefixOf("optim.weight"), "");
}

}  // namespace
}  // namespace ckptfs
