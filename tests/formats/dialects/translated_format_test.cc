// SPDX-License-Identifier: Apache-2.0

#include "formats/dialects/translated_format.h"

#include <gtest/gtest.h>

#include "core/base/strings.h"
#include "core/view/view_set.h"
#include "formats/registry.h"

namespace ckptfs {
namespace {

constexpr std::string_view kGateUp = "model.layers.0.mlp.experts.gate_up_proj";
constexpr std::string_view kFile = "model.layers.0.block_sparse_moe.experts.1.w3.weight";

using Tensors = std::vector<std::pair<std::string, Shape>>;

std::shared_ptr<StepModel> StepOf(const Tensors& tensors) {
  auto step = std::make_shared<StepModel>();
  step->framework = "dcp";
  step->roots = {"/nowhere"};
  step->blobs.emplace_back();
  step->blobs.front().stamp.size = 1 << 20;
  uint64_t at = 0;
  for (const auto& [name, shape] : tensors) {
    Parameter parameter;
    parameter.name = name;
    parameter.shape = shape;
    Atom atom;
    atom.parameter = ParameterIndex{static_cast<uint32_t>(step->parameters.size())};
    atom.kind = "weight";
    atom.shape = shape;
    const uint64_t count = ElementCount(shape).value();
    atom.source.gathers = {
        {{WholeTensor(shape)}, {{0, 1, 0, 0, count, 0, 0, at, 0, DType::kF32}}, {}}};
    at += 4 * count;
    step->parameters.push_back(std::move(parameter));
    step->atoms.push_back(std::move(atom));
  }
  step->BuildIndex();
  return step;
}

// One layer, but for its feed-forward part.
Tensors Attention() {
  Tensors tensors = {{"model.embed_tokens.weight", {8, 4}},
                     {"model.norm.weight", {4}},
                     {"lm_head.weight", {8, 4}}};
  for (const char* norm : {"input", "post_attention"}) {
    tensors.push_back({StrCat("model.layers.0.", norm, "_layernorm.weight"), {4}});
  }
  for (const char* part : {"q", "k", "v", "o"}) {
    tensors.push_back({StrCat("model.layers.0.self_attn.", part, "_proj.weight"), {4, 4}});
  }
  return tensors;
}

// Tensors of a Mixtral of one layer and two experts, as its modules are called.
std::shared_ptr<const StepModel> Step() {
  Tensors tensors = Attention();
  tensors.push_back({"model.layers.0.mlp.gate.weight", {2, 4}});
  tensors.push_back({std::string(kGateUp), {2, 6, 4}});
  tensors.push_back({"model.layers.0.mlp.experts.down_proj", {2, 4, 3}});
  auto step = StepOf(tensors);
  Group group;
  for (uint32_t p = 0; p < step->parameters.size(); ++p) {
    group.parameters.push_back(ParameterIndex{p});
  }
  step->groups = {group};
  return step;
}

std::optional<ModelFiles> Config(const std::string& more = "") {
  ModelFiles files;
  files.files.push_back(
      {"config.json", std::make_shared<const std::string>(StrCat(
                          R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",)",
                          R"( "num_local_experts": 2)", more, "}"))});
  return files;
}

std::shared_ptr<const ViewSet> Open(const std::string& layout,
                                    std::optional<ModelFiles> models = Config()) {
  return ViewSet::Open(Step(), Layout::Parse(layout).value(), MakeViewFormats(std::move(models)));
}

bool Has(const ViewSet& views, std::string_view file, std::string_view name) {
  const auto shown = views.MakePlan(file);
  EXPECT_TRUE(shown.has_value()) << shown.error().message;
  return shown && shown->step->FindParameter(name).has_value();
}

std::string Refusal(const ViewSet& views, std::string_view format) {
  for (const LayoutOffer::Answer& answer : views.offer().answers) {
    if (answer.format == format && answer.refusal) return answer.refusal->message;
  }
  return "shown";
}

TEST(TranslatedFormatTest, FilesForTransformersHaveTheNamesOfFilesAndRanksThoseOfTheSource) {
  const auto views = Open("tp1");
  EXPECT_TRUE(Has(*views, "huggingface/model.safetensors", kFile));
  EXPECT_FALSE(Has(*views, "huggingface/model.safetensors", kGateUp));
  EXPECT_TRUE(Has(*views, "rank0/model.pt", kGateUp));
  for (const LayoutOffer::Answer& answer : views->offer().answers) {
    EXPECT_TRUE(answer.format != "huggingface" || answer.left_out.empty());
  }
}

TEST(TranslatedFormatTest, ATokenGivesEachFormatItsNames) {
  const auto files = Open("hf");
  for (const char* file : {"rank0/model.pt", "dcp/.metadata", "huggingface/model.safetensors"}) {
    EXPECT_TRUE(Has(*files, file, kFile)) << file;
  }
  const auto modules = Open("hf5");
  EXPECT_TRUE(Has(*modules, "dcp/.metadata", kGateUp));
  // Its readers know files alone.
  EXPECT_TRUE(Has(*modules, "huggingface/model.safetensors", kFile));
}

TEST(TranslatedFormatTest, WithoutEvidenceNamesStayAndATokenIsRefused) {
  const auto views = Open("hf", std::nullopt);
  EXPECT_EQ(Refusal(*views, "rank"),
            "names 'hf': nothing proves how its tensors are named: no config.json says which model "
            "it is");
  const auto quantised = Config(R"(, "quantization_config": {"quant_method": "fp8"})");
  EXPECT_NE(Refusal(*Open("hf", quantised), "dcp").find("quantised"), std::string::npos);
  const auto other = Config(R"(, "num_experts": 3)");
  EXPECT_NE(Refusal(*Open("hf", other), "rank").find("it has 2 experts, but config.json 3"),
            std::string::npos)
      << Refusal(*Open("hf", other), "rank");
  EXPECT_TRUE(Has(*Open("tp1", other), "huggingface/model.safetensors", kGateUp));
}

TEST(TranslatedFormatTest, NumbersOfParametersAreNotThoseOfOtherNames) {
  EXPECT_NE(Refusal(*Open("hf_numbered"), "dcp").find("only known under the source's names"),
            std::string::npos);
  EXPECT_EQ(Refusal(*Open("hf5_numbered"), "rank"), "shown");
}

TEST(TranslationsTest, AStepIsTranslatedOnceForAll) {
  const auto translations = Translations::Make(Config()).value();
  const auto step = Step();
  const auto files = translations->To(step, Dialect::kHf).value();
  EXPECT_EQ(translations->To(step, Dialect::kHf).value(), files);
  EXPECT_EQ(translations->To(step, Dialect::kHf5).value(), step);
  EXPECT_NE(translations->To(step, Dialect::kHf, Carried::kWeights).value(), files);
  EXPECT_EQ(translations->Of(step).dialect, Dialect::kHf5);
  EXPECT_EQ(translations->Of(files).dialect, Dialect::kHf);
}

// Names of files and of modules are the same for transformers 5, but not for Megatron.
TEST(TranslationsTest, NamesThatOneLibraryKeepsAnotherDoesNot) {
  Tensors tensors = Attention();
  for (const char* part : {"gate", "up"}) {
    tensors.push_back({StrCat("model.layers.0.mlp.", part, "_proj.weight"), {6, 4}});
  }
  tensors.push_back({"model.layers.0.mlp.down_proj.weight", {4, 6}});
  const std::shared_ptr<const StepModel> step = StepOf(tensors);
  ModelFiles config;
  config.files.push_back(
      {"config.json", std::make_shared<const std::string>(
                          R"({"model_type": "llama", "num_attention_heads": 2, "head_dim": 2,)"
                          R"( "num_key_value_heads": 2, "hidden_size": 4})")});
  const auto translations = Translations::Make(config).value();
  EXPECT_EQ(translations->To(step, Dialect::kHf).value(), step);
  EXPECT_EQ(translations->To(step, Dialect::kHf5).value(), step);
  const auto megatron = translations->To(step, Dialect::kMcore);
  ASSERT_TRUE(megatron) << megatron.error().message;
  EXPECT_TRUE((*megatron)->FindParameter("decoder.layers.0.mlp.linear_fc1.weight"));
  const auto back = translations->To(*megatron, Dialect::kHf).value();
  EXPECT_TRUE(back->FindParameter("model.layers.0.mlp.up_proj.weight"));
}

}  // namespace
}  // namespace ckptfs
