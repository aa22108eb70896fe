// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/blob/safetensors_header.h"
#include "core/io/file_root.h"
#include "core/state/assembler.h"
#include "core/view/plan_reader.h"
#include "formats/huggingface/shard_index.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ModelFiles Given(const std::string& config) {
  ModelFiles models;
  models.files.push_back({"config.json", std::make_shared<const std::string>(config)});
  return models;
}

Layout LayoutOf(std::string_view text) { return Layout::Parse(text).value(); }

std::string WhyNot(std::shared_ptr<const StepModel> step, std::string_view layout,
                   std::optional<ModelFiles> given) {
  const auto view =
      HuggingFaceFormat(std::move(given)).Open(ShownState::Of(std::move(step), LayoutOf(layout)));
  return view ? "shown" : view.error().message;
}

std::string LiteralOf(const View& view, const std::string& path) {
  const Plan plan = view.MakePlan(path).value();
  const auto* literal = std::get_if<LiteralSegment>(&plan.segments().at(0).body);
  return literal == nullptr ? "" : *literal->bytes;
}

// Parameters of one blob that is as long as they need.
std::shared_ptr<const StepModel> StepOf(
    const std::vector<std::pair<std::string, Shape>>& parameters,
    const std::vector<std::pair<std::string, size_t>>& aliases = {}, const std::string& tool = "") {
  Assembler assembler;
  if (!tool.empty()) {
    assembler.header().facts.tool = {tool, "own"};
  }
  Blob blob;
  blob.root = assembler.AddRoot(std::make_shared<FileRoot>("/nowhere"));
  blob.path = "data";
  for (const auto& entry : parameters)
    blob.stamp.size += ByteCount(entry.second, DType::kF32).value();
  const BlobIndex data = assembler.AddBlob(blob);
  std::vector<ParameterIndex> indexes;
  uint64_t at = 0;
  for (const auto& [name, shape] : parameters) {
    Parameter parameter;
    parameter.name = name;
    parameter.shape = shape;
    indexes.push_back(assembler.AddParameter(parameter).value());
    const AtomIndex atom =
        assembler.AddAtom(indexes.back(), "", "weight", DType::kF32, shape).value();
    const uint64_t elements = ElementCount(shape).value();
    const uint32_t local = assembler.AddLocal(atom, 0, WholeTensor(shape));
    assembler.AddFragment(atom, 0, local, Fragment{0, elements, data, at, DType::kF32});
    at += elements * 4;
  }
  for (const auto& [alias, parameter] : aliases) assembler.AddAlias(alias, indexes[parameter]);
  assembler.header().model_dtype = DType::kF32;
  return std::make_shared<const StepModel>(std::move(assembler).Finish().value());
}

std::vector<std::string> TensorNames(const View& view, const std::string& path) {
  const std::string header = LiteralOf(view, path);
  const uint64_t size = view.Find(path).value().size;
  std::vector<std::string> names;
  const SafetensorsHeader parsed = ParseSafetensorsHeader(header, size).value();
  for (const SafetensorsEntry& entry : parsed.entries) names.push_back(entry.name);
  return names;
}

// The names in a view of a step that a tool saved, by position.
std::vector<std::string> NamesOf(const std::string& tool, const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, Shape>> parameters;
  for (const std::string& name : names) parameters.push_back({name, {2}});
  const auto view = HuggingFaceFormat(Given("{}"))
                        .Open(ShownState::Of(StepOf(parameters, {}, tool), LayoutOf("tp1")));
  return TensorNames(**view, "huggingface/model.safetensors");
}

TEST(HuggingFaceViewTest, TheAttributeOfALightningModuleIsTakenOff) {
  const std::vector<std::string> own = {"net.model.norm.weight", "net.lm_head.weight"};
  EXPECT_THAT(NamesOf("lightning", own), ElementsAre("model.norm.weight", "lm_head.weight"));
  EXPECT_EQ(NamesOf("trainer", own), own);
  const std::vector<std::string> several = {"net.model.norm.weight", "metric.total"};
  EXPECT_EQ(NamesOf("lightning", several), several);
  const std::vector<std::string> bare = {"net.", "net.weight"};
  EXPECT_EQ(NamesOf("lightning", bare), bare);
}

TEST(HuggingFaceViewTest, IsAbsentWithoutAConfig) {
  const auto step = StepOf({{"a", {2}}});
  EXPECT_THAT(WhyNot(step, "tp1", std::nullopt), HasSubstr("--hf-config"));
  EXPECT_EQ(WhyNot(step, "tp1", Given("{}")), "shown");
}

TEST(HuggingFaceViewTest, StepsThatTransformersCannotLoadSayWhy) {
  EXPECT_THAT(
      WhyNot(StepOf({{"model.layers.0.q_proj.base_layer.weight", {2}}}), "tp1", Given("{}")),
      HasSubstr("PEFT"));
  EXPECT_THAT(WhyNot(StepOf({{"h.0.mlp.deepspeed_moe.experts.weight", {2}}}), "tp1", Given("{}")),
              HasSubstr("DeepSpeed's own experts"));
  EXPECT_THAT(WhyNot(StepOf({{"module.a", {2}}, {"a", {2}}}), "tp1", Given("{}")),
              HasSubstr("two parameters are 'a'"));
  const std::string packed = R"({"quantization_config": {"quant_method": "gptq"}})";
  EXPECT_THAT(WhyNot(StepOf({{"a", {2}}}), "tp1_bf16", Given(packed)), HasSubstr("gptq"));
  EXPECT_EQ(WhyNot(StepOf({{"a", {2}}}), "tp1", Given(packed)), "shown");
  auto piped = std::make_shared<StepModel>(*StepOf({{"0.weight", {2}}}));
  piped->layout.naming = Naming::kPipe;
  EXPECT_THAT(WhyNot(piped, "tp1", Given("{}")), HasSubstr("pipeline"));
}

TEST(HuggingFaceViewTest, WordsOfWrappersAreTakenOffAndTiedHeadsDropped) {
  const auto step = StepOf({{"module.lm_head.weight", {2}}, {"module._orig_mod.b", {1}}},
                           {{"module.model.embed_tokens.weight", 0}});
  const auto view =
      HuggingFaceFormat(Given("{}")).Open(ShownState::Of(step, LayoutOf("tp1"))).value();
  EXPECT_THAT(TensorNames(*view, "huggingface/model.safetensors"),
              ElementsAre("model.embed_tokens.weight", "b"));
}

TEST(HuggingFaceViewTest, LargeModelsAreShardedWithAnIndex) {
  const uint64_t gib = uint64_t{1} << 30;
  const auto step =
      StepOf({{"a", {gib}}, {"b", {gib / 8}}, {"c", {gib}}, {"d", {2 * gib}}, {"e", {3}}});
  const auto view =
      HuggingFaceFormat(Given("{}")).Open(ShownState::Of(step, LayoutOf("tp1"))).value();
  std::vector<std::string> names;
  const std::vector<ViewEntry> entries = view->List("huggingface").value();
  for (const ViewEntry& entry : entries) names.push_back(entry.name);
  EXPECT_THAT(names,
              ElementsAre("config.json", "model-00001-of-00004.safetensors",
                          "model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors",
                          "model-00004-of-00004.safetensors", "model.safetensors.index.json"));
  const auto map =
      huggingface::ParseShardIndex(LiteralOf(*view, "huggingface/model.safetensors.index.json"));
  ASSERT_TRUE(map) << map.error().message;
  EXPECT_EQ(map->size(), 5u);
  for (const auto& [tensor, file] : *map) {
    EXPECT_THAT(TensorNames(*view, "huggingface/" + file), testing::Contains(tensor));
  }
  EXPECT_THAT(TensorNames(*view, "huggingface/model-00001-of-00004.safetensors"),
              ElementsAre("a", "b"));
  EXPECT_EQ(view->Find("huggingface/model-00003-of-00004.safetensors")->size, 8 * gib + 4096);
  EXPECT_FALSE(view->Find("huggingface/model.safetensors"));
}

// The tensors of a Llama of one layer under its own names, of 8 words and 4 elements.
std::vector<std::pair<std::string, Shape>> Llama() {
  std::vector<std::pair<std::string, Shape>> all = {{"model.embed_tokens.weight", {8, 4}},
                                                    {"model.norm.weight", {4}},
                                                    {"lm_head.weight", {8, 4}}};
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                           "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                           "input_layernorm", "post_attention_layernorm"}) {
    all.push_back({std::string("model.layers.0.") + name + ".weight", {4, 4}});
  }
  return all;
}

std::string OfLlama(const std::string& more) {
  return R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, )"
         R"("hidden_size": 4, "num_hidden_layers": 1)" +
         more + "}";
}

TEST(HuggingFaceViewTest, NamesOfAnotherModelAreRefused) {
  EXPECT_EQ(WhyNot(StepOf(Llama()), "tp1", Given(OfLlama(""))), "shown");
  const std::string why = WhyNot(StepOf({{"tok_embeddings.weight", {8, 4}},
                                         {"layers.0.attention.wq.weight", {4, 4}},
                                         {"norm.weight", {4}}}),
                                 "tp1", Given(OfLlama("")));
  EXPECT_THAT(why, HasSubstr("LlamaForCausalLM"));
  EXPECT_THAT(why, HasSubstr("random"));
  EXPECT_THAT(why, HasSubstr("tok_embeddings.weight"));
  auto wrapped = Llama();  // as a module of one's own has them
  for (auto& entry : wrapped) entry.first = "llm." + entry.first;
  EXPECT_THAT(WhyNot(StepOf(wrapped), "tp1", Given(OfLlama(""))),
              HasSubstr("llm.model.embed_tokens.weight"));
}

TEST(HuggingFaceViewTest, AHeadThatNothingTiesMustBeThere) {
  auto tensors = Llama();
  tensors.erase(tensors.begin() + 2);
  EXPECT_EQ(WhyNot(StepOf(tensors), "tp1", Given(OfLlama(R"(, "tie_word_embeddings": true)"))),
            "shown");
  EXPECT_THAT(WhyNot(StepOf(tensors), "tp1", Given(OfLlama(R"(, "tie_word_embeddings": false)"))),
              HasSubstr("lm_head.weight"));
}

TEST(HuggingFaceViewTest, AConfigOfOtherSizesIsRefused) {
  for (const auto& [from, to] :
       {std::pair(R"("vocab_size": 8)", R"("vocab_size": 9)"),
        std::pair(R"("hidden_size": 4)", R"("hidden_size": 8)"),
        std::pair(R"("num_hidden_layers": 1)", R"("num_hidden_layers": 2)")}) {
    std::string config = OfLlama("");
    config.replace(config.find(from), std::string_view(from).size(), to);
    EXPECT_THAT(WhyNot(StepOf(Llama()), "tp1", Given(config)), HasSubstr("config.json has ")) << to;
  }
}

TEST(HuggingFaceViewTest, WhatIsNotComparedOrNotTakenIsSaid) {
  const auto said = [](const std::vector<std::pair<std::string, Shape>>& tensors,
                       const std::string& config) {
    const auto view =
        HuggingFaceFormat(Given(config)).Open(ShownState::Of(StepOf(tensors), LayoutOf("tp1")));
    const auto lines = view ? (*view)->LeftOut() : std::vector<std::string>{view.error().message};
    return lines.empty() ? "" : lines.front();
  };
  EXPECT_EQ(said(Llama(), OfLlama("")), "");
  EXPECT_THAT(said({{"a", {2}}}, R"({"architectures": ["MyModel"]})"),
              HasSubstr("names are not compared"));
  auto more = Llama();
  more.push_back({"v_head.weight", {1}});
  EXPECT_THAT(said(more, OfLlama("")), HasSubstr("v_head.weight"));
}

TEST(HuggingFaceViewTest, TheConfigsDTypeFollowsWhatIsShown) {
  const TinyStep step((TinyStepOptions()));
  const auto config = [&](std::string_view layout) {
    const auto view = HuggingFaceFormat(Given(R"({"dtype": "float16", "x": 1e-5})"))
                          .Open(ShownState::Of(step.shared(), LayoutOf(layout)));
    return view ? LiteralOf(**view, "huggingface/config.json") : view.error().message;
  };
  EXPECT_EQ(config("tp1_fp32"), R"({"dtype": "float32", "x": 1e-5})");
  EXPECT_EQ(config("tp1_fp16"), R"({"dtype": "float16", "x": 1e-5})");
  const std::string stored(TorchName(*step.model().model_dtype));
  EXPECT_EQ(config("tp1"), R"({"dtype": ")" + stored + R"(", "x": 1e-5})");
}

}  // namespace
}  // namespace ckptfs
