// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/shown_names.h"

#include <gtest/gtest.h>

#include "formats/families/shipped.h"

namespace ckptfs {
namespace {

Parameter Named(const std::string& name) {
  Parameter parameter;
  parameter.name = name;
  return parameter;
}

StepModel Plain(bool tied) {
  StepModel step;
  step.family = "llama_fused";
  step.family_rules = ShippedFamilies()->Find("llama_fused")->text();
  step.layers = 2;
  step.layout.naming = Naming::kPlain;
  step.parameters = {Named("model.embed_tokens.weight"),
                     Named("model.layers.1.mlp.down_proj.weight"), Named("model.norm.weight")};
  if (tied) step.aliases = {{"lm_head.weight", ParameterIndex{0}}};
  if (!tied) step.parameters.push_back(Named("lm_head.weight"));
  return step;
}

Layout Of(const char* text) { return Layout::Parse(text).value(); }

TEST(ShownNamesTest, AsSourceAndTheSourcesOwnTokenKeepTheNames) {
  const StepModel step = Plain(true);
  for (const char* layout : {"tp1", "tp1_plain"}) {
    const auto names = NamesFor(step, Of(layout));
    ASSERT_TRUE(names.has_value());
    EXPECT_EQ(names->parameters[1], "model.layers.1.mlp.down_proj.weight");
    EXPECT_EQ(names->aliases[0], "lm_head.weight");
  }
}

TEST(ShownNamesTest, PipelineNamesCountLayersFromTheEmbedding) {
  const auto names = NamesFor(Plain(false), Of("tp1_pipe"));
  ASSERT_TRUE(names.has_value()) << names.error().message;
  EXPECT_EQ(names->parameters, (std::vector<std::string>{"0.weight", "2.mlp.down_proj.weight",
                                                         "3.weight", "4.weight"}));
}

TEST(ShownNamesTest, TiedEmbeddingHasOneNameInAPipeline) {
  const auto names = NamesFor(Plain(true), Of("tp1_pipe"));
  ASSERT_TRUE(names.has_value()) << names.error().message;
  EXPECT_EQ(names->parameters[0], "tied_modules.embed.weight");
  EXPECT_EQ(names->aliases[0], "");
}

TEST(ShownNamesTest, RefusalsNameTheParameterOrTheFamily) {
  StepModel step = Plain(false);
  step.parameters.push_back(Named("something.else"));
  auto names = NamesFor(step, Of("tp1_pipe"));
  ASSERT_FALSE(names.has_value());
  EXPECT_NE(names.error().message.find("something.else"), std::string::npos);
  step.family = "";
  names = NamesFor(step, Of("tp1_pipe"));
  ASSERT_FALSE(names.has_value());
  EXPECT_NE(names.error().message.find("--family"), std::string::npos);
  step.family = "llama_fused";
  step.family_rules = "";  // as old manifests have it
  names = NamesFor(step, Of("tp1_pipe"));
  ASSERT_FALSE(names.has_value());
  EXPECT_NE(names.error().message.find("adopt it again"), std::string::npos);
}

TEST(ShownNamesTest, TheStepsOwnRulesCountWhateverIsKnownHere) {
  StepModel step = Plain(false);
  step.family = "mine";
  step.family_rules = R"(
name = "mine"
[[rename]]
plain = "model.{rest}"
pipe = "body.{rest}"
[[rename]]
plain = "lm_head.{rest}"
pipe = "head.{rest}"
)";
  const auto names = NamesFor(step, Of("tp1_pipe"));
  ASSERT_TRUE(names.has_value()) << names.error().message;
  EXPECT_EQ(names->parameters[0], "body.embed_tokens.weight");
  EXPECT_EQ(names->parameters[3], "head.weight");
}

TEST(ShownNamesTest, TwoParametersNeverGetOneName) {
  StepModel step = Plain(false);
  step.parameters.push_back(Named("3.weight"));  // already a pipeline's name, of model.norm
  const auto names = NamesFor(step, Of("tp1_pipe"));
  ASSERT_FALSE(names.has_value());
  EXPECT_NE(names.error().message.find("would both"), std::string::npos) << names.error().message;
}

}  // namespace
}  // namespace ckptfs
