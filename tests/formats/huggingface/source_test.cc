// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "formats/families/shipped.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

namespace files = std::filesystem;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Safetensors(std::vector<SafetensorsEntry> entries,
                        const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
  std::string text = RenderSafetensorsHeader(metadata, entries).value();
  return text + std::string(entries.empty() ? 0 : entries.back().end, 'w');
}

// A header as it stands, whatever it says.
std::string RawSafetensors(const std::string& json, size_t data) {
  std::string text(8, '\0');
  for (size_t i = 0; i < 8; ++i) text[i] = static_cast<char>(json.size() >> (8 * i) & 0xff);
  return text + json + std::string(data, 'w');
}

class HuggingFaceSourceTest : public testing::Test {
 protected:
  HuggingFaceSourceTest() : source_(MakeHuggingFaceSource()), families_(ShippedFamilies().value()) {
    options_.families = &families_;
    path_ = directory_.path() + "/model";
    files::create_directory(path_);
  }

  void Write(const std::string& name, const std::string& bytes) {
    directory_.Write("model/" + name, bytes);
  }

  Result<StepModel> Read(const std::string& path) {
    CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(path));
    CKPT_ASSIGN_OR_RETURN(const auto found, source_->Find(place.root, place.directory));
    if (found.size() != 1)
      return Fail(ErrorCode::kNotFound, std::to_string(found.size()) + " steps");
    CKPT_RETURN_IF_ERROR(source_->StateOf(found[0], options_, {}).Readable());
    return source_->Read(found[0], options_);
  }
  Result<StepModel> Read() { return Read(path_); }
  std::string Refusal() {
    const auto read = Read();
    return read ? "taken" : read.error().message;
  }

  TemporaryDirectory directory_;
  std::string path_;
  std::unique_ptr<Source> source_;
  FamilySet families_;
  SourceOptions options_;
};

TEST_F(HuggingFaceSourceTest, ReadsWholeWeightsWhereTheyLie) {
  Write("config.json",
        R"({"architectures": ["LlamaForCausalLM"], "transformers_version": "5.23.0"})");
  Write("model.safetensors", Safetensors({{"model.norm.weight", DType::kBF16, {4}},
                                          {"lm_head.weight", DType::kBF16, {8, 4}}}));
  Write("pytorch_model.bin", "not read: safetensors come first");
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->framework, "huggingface");
  EXPECT_EQ(step->framework_version, "5.23.0");
  EXPECT_EQ(step->id, "model");
  EXPECT_EQ(step->model_dtype, std::optional(DType::kBF16));
  ASSERT_EQ(step->parameters.size(), 2u);
  const Atom& atom =
      step->atom(step->FindAtom(*step->FindParameter("lm_head.weight"), "weight").value());
  EXPECT_EQ(atom.shape, (Shape{8, 4}));
  EXPECT_EQ(atom.source.gathers[0].series[0].offset, 4096u + 8);
  EXPECT_EQ(step->parameter(*step->FindParameter("lm_head.weight")).pattern.kind,
            PatternKind::kShard);
  EXPECT_TRUE(step->facts.model_files.config());
  ASSERT_EQ(step->blobs.size(), 3u);
  EXPECT_EQ(step->blobs[0].path, "model.safetensors");
}

TEST_F(HuggingFaceSourceTest, FoldersThatAreNotTakenAreNamed) {
  Write("config.json", "{}");
  Write("model.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  Write("original/params.json", "{}");
  Write("original/consolidated.00.pth", "weights of another making");
  Write("additional_chat_templates/tool.jinja", "x");
  Write(".cache/huggingface", "x");
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->parameters.size(), 1u);
  EXPECT_THAT(step->notes, Contains("folders beside the model that are not taken: original/"));
}

TEST_F(HuggingFaceSourceTest, ATiedHeadIsTheEmbedding) {
  const std::string tensors = Safetensors({{"model.embed_tokens.weight", DType::kF32, {8, 4}}});
  const auto aliases = [&](const std::string& config) {
    Write("config.json", config);
    Write("model.safetensors", tensors);
    const auto step = Read();
    return step ? step->aliases.size() : size_t{99};
  };
  EXPECT_EQ(aliases(R"({"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": true})"), 1u);
  EXPECT_EQ(aliases(R"({"architectures": ["Qwen2ForCausalLM"]})"), 1u);
  EXPECT_EQ(aliases(R"({"tie_word_embeddings": true})"), 1u);
  EXPECT_EQ(aliases(R"({"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": false})"),
            0u);
  EXPECT_EQ(aliases(R"({"architectures": ["Qwen2Model"], "tie_word_embeddings": true})"), 0u);
  EXPECT_EQ(aliases("{}"), 0u);
}

TEST_F(HuggingFaceSourceTest, AHeadOfItsOwnStaysOneWhateverTheConfigSays) {
  Write("config.json", R"({"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": true})");
  Write("model.safetensors", Safetensors({{"lm_head.weight", DType::kF32, {8, 4}},
                                          {"transformer.wte.weight", DType::kF32, {8, 4}}}));
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->parameters.size(), 2u);
  EXPECT_TRUE(step->aliases.empty());
  EXPECT_THAT(step->notes, testing::Contains(HasSubstr("tie_word_embeddings")));
}

TEST_F(HuggingFaceSourceTest, WhatSaveModelDroppedIsASecondName) {
  Write("model.safetensors",
        Safetensors({{"a", DType::kF32, {2}}}, {{"b", "a"}, {"c", "nothing"}}));
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  ASSERT_EQ(step->aliases.size(), 1u);
  EXPECT_EQ(step->aliases[0].name, "b");
}

// safetensors, and transformers, give metadata no meaning.
TEST_F(HuggingFaceSourceTest, MetadataThatIsNotATieNamesNothing) {
  const auto aliases = [&](const std::vector<std::string>& names, const std::string& alias,
                           const std::string& name, const std::string& config = "") {
    std::vector<SafetensorsEntry> entries;
    for (const std::string& stored : names) entries.push_back({stored, DType::kF32, {2}});
    if (!config.empty()) Write("config.json", config);
    Write("model.safetensors", Safetensors(entries, {{"format", "pt"}, {alias, name}}));
    const auto step = Read();
    std::vector<std::string> out;
    if (!step) return std::vector<std::string>{step.error().message};
    for (const auto& entry : step->aliases) out.push_back(entry.name);
    return out;
  };
  const std::string head = "lm_head.weight", embedding = "model.embed_tokens.weight";
  EXPECT_THAT(aliases({head, "m.weight"}, "classifier", head), IsEmpty());
  EXPECT_THAT(aliases({head, "m.weight"}, "classifier.weight", head), IsEmpty());
  EXPECT_THAT(aliases({"model.norm.weight"}, "best", "model.norm.weight"), IsEmpty());
  EXPECT_THAT(aliases({"pt", "a"}, "b", "c"), IsEmpty());
  // Written for a model with a head, and given to one that was saved by its base's names.
  EXPECT_THAT(aliases({"embed_tokens.weight", head}, embedding, head), IsEmpty());
  EXPECT_THAT(aliases({head}, embedding, head), ElementsAre(embedding));
  EXPECT_THAT(aliases({"tied.weight"}, "x.tied.weight", "tied.weight"),
              ElementsAre("x.tied.weight"));
  const std::string untied = R"({"tie_word_embeddings": false})";
  EXPECT_THAT(aliases({head}, embedding, head, untied), IsEmpty());
  EXPECT_THAT(aliases({embedding}, head, embedding, untied), IsEmpty());
}

TEST_F(HuggingFaceSourceTest, AModelsOwnHeadIsTheEmbedding) {
  for (const auto& [type, head] :
       std::map<std::string, std::string>{{"whisper", "proj_out.weight"},
                                          {"moonshine_streaming", "proj_out.weight"},
                                          {"trocr", "output_projection.weight"},
                                          {"opt", "lm_head.weight"}}) {
    Write(
        "config.json",
        StrCat(R"({"architectures": ["XForConditionalGeneration"], "model_type": ")", type, "\"}"));
    Write("model.safetensors",
          Safetensors({{"model.decoder.embed_tokens.weight", DType::kF32, {8, 4}}}));
    const auto step = Read();
    ASSERT_TRUE(step) << step.error().message;
    ASSERT_EQ(step->aliases.size(), 1u);
    EXPECT_EQ(step->aliases[0].name, head);
  }
}

// One look-up for each, and not one for each pair of tensor and second name.
TEST_F(HuggingFaceSourceTest, ManySecondNamesAreNotManyTimesLookedUp) {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  for (int i = 0; i < 40'000; ++i) {
    entries.push_back({StrCat("m.", i, ".weight"), DType::kF32, {1}});
    metadata.emplace(StrCat("alias.", i, ".weight"), entries.back().name);
  }
  Write("model.safetensors", Safetensors(entries, metadata));
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->aliases.size(), entries.size());
}

// rsync copies what is in folders last, under names of its own.
TEST_F(HuggingFaceSourceTest, AnEnginesTagThatIsNotThereYetIsMissed) {
  Write("model.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  Write("trainer_state.json", "{}");
  Write("runs/x", "");
  EXPECT_EQ(Refusal(), "taken");
  Write("global_step6/.mp_rank_00_model_states.pt.Xa81zq", "half");
  EXPECT_THAT(Refusal(), HasSubstr("/global_step6: empty, though DeepSpeed's optimizer"));
  options_.weights_only = true;
  EXPECT_EQ(Refusal(), "taken");
}

TEST_F(HuggingFaceSourceTest, ShardsAndTheirIndexMustAgree) {
  const std::string index = "model.safetensors.index.json";
  Write("one", Safetensors({{"a", DType::kF32, {2}}, {"extra", DType::kF32, {1}}}));
  EXPECT_EQ(Refusal(), "0 steps");
  Write(index,
        R"({"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})");
  files::rename(path_ + "/one", path_ + "/one.safetensors");
  EXPECT_THAT(Refusal(), HasSubstr("two.safetensors: missing"));
  Write("two.safetensors", Safetensors({{"c", DType::kF32, {2}}}));
  EXPECT_THAT(Refusal(), HasSubstr("says that 'b' is in two.safetensors"));
  Write("two.safetensors", Safetensors({{"a", DType::kF32, {2}}, {"b", DType::kF32, {2}}}));
  EXPECT_THAT(Refusal(), HasSubstr("'a' is in one.safetensors and in two.safetensors"));
  Write("two.safetensors", Safetensors({{"b", DType::kF32, {2}}}));
  const auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->parameters.size(), 3u);  // tensors that the index does not mention, too
  Write(index, R"({"weight_map": {"a": "../model/one.safetensors"}})");
  EXPECT_THAT(Refusal(), HasSubstr("same directory"));
}

TEST_F(HuggingFaceSourceTest, HostileHeadersAreRefusedByFileAndRule) {
  const std::pair<std::string, std::string> cases[] = {
      {RawSafetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                      R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                      12),
       "hole or overlaps"},
      {RawSafetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12),
       "hole or overlaps"},
      {RawSafetensors(
           R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8),
       "'a'"},
      {RawSafetensors(
           R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})", 8),
       "'a'"},
      {RawSafetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                      R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                      8),
       "two keys"},
      {RawSafetensors(R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", 8),
       "unknown dtype 'F33'"},
      {RawSafetensors(R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})", 1),
       "less than a byte"},
      {RawSafetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 9),
       "the file has 9"},
      {RawSafetensors(
           R"({"__metadata__":{"format":"flax"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
           8),
       "flax"},
      {std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), "exceeds"},
      {"short", "shorter"}};
  for (const auto& [bytes, rule] : cases) {
    Write("model.safetensors", bytes);
    EXPECT_THAT(Refusal(), testing::AllOf(HasSubstr("model.safetensors"), HasSubstr(rule)));
  }
}

TEST_F(HuggingFaceSourceTest, PackedWeightsAreCarriedAndNeverCut) {
  const auto pattern = [&](const std::string& config, const std::string& beside, DType dtype) {
    Write("config.json", config);
    Write("model.safetensors",
          Safetensors({{"model.layers.0.mlp.up_proj.weight", dtype, {8, 4}},
                       {"model.layers.0.mlp.up_proj" + beside, DType::kU8, {4}}}));
    const auto step = Read();
    EXPECT_TRUE(step) << step.error().message;
    return step ? step->parameter(*step->FindParameter("model.layers.0.mlp.up_proj.weight"))
                      .pattern.kind
                : PatternKind::kUnique;
  };
  EXPECT_EQ(pattern("{}", ".other", DType::kF32), PatternKind::kShard);
  EXPECT_EQ(pattern("{}", ".other", DType::kU8), PatternKind::kUnknown);
  EXPECT_EQ(pattern("{}", ".weight_scale_inv", DType::kF8E4M3), PatternKind::kUnknown);
  EXPECT_EQ(pattern("{}", ".weight.quant_state.bitsandbytes__nf4", DType::kF32),
            PatternKind::kUnknown);
  EXPECT_EQ(pattern(R"({"quantization_config": {"quant_method": "gptq"}})", ".g", DType::kF32),
            PatternKind::kUnknown);
}

TEST_F(HuggingFaceSourceTest, AdaptersAreTakenApartAndForeignNamesAreRefused) {
  Write("adapter_config.json", "{}");
  Write("adapter_model.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  Write("config.json", R"({"tie_word_embeddings": true, "architectures": ["XForCausalLM"]})");
  const auto adapter = Read();
  ASSERT_TRUE(adapter) << adapter.error().message;
  EXPECT_TRUE(adapter->FindParameter("a"));
  EXPECT_NE(adapter->facts.model_files.Find("adapter_config.json"), nullptr);
  Write("config.json", "{}");
  EXPECT_TRUE(Read(path_ + "/adapter_model.safetensors"));
  Write("global_step2/data", "what a trainer keeps beside it");
  EXPECT_EQ(Refusal(), "0 steps");
  Write("model.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  EXPECT_EQ(Refusal(), "taken");
  Write("config.json", R"({"transformers_weights": "other.safetensors"})");
  EXPECT_THAT(Refusal(), HasSubstr("other.safetensors"));
}

// from_pretrained takes what config.json names before any other file, an index as well.
TEST_F(HuggingFaceSourceTest, TheConfigsOwnNameOfItsWeightsIsTaken) {
  Write("config.json", R"({"transformers_weights": "own.safetensors"})");
  Write("own.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  EXPECT_EQ(Refusal(), "taken");
  Write("model.safetensors", Safetensors({{"b", DType::kF32, {2}}}));
  auto step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_TRUE(step->FindParameter("a"));
  EXPECT_FALSE(step->FindParameter("b"));
  Write("config.json", R"({"transformers_weights": "own.safetensors.index.json"})");
  Write("own.safetensors.index.json",
        R"({"metadata": {}, "weight_map": {"a": "own.safetensors"}})");
  step = Read();
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_TRUE(step->FindParameter("a"));
  Write("config.json", R"({"transformers_weights": "../own.safetensors"})");
  EXPECT_THAT(Refusal(), HasSubstr("transformers_weights"));
}

// Headers say what is in a file, whatever the index says of it.
TEST_F(HuggingFaceSourceTest, AnIndexThatNamesTheOtherShardIsRead) {
  Write("part/one.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  Write("two.safetensors", Safetensors({{"b", DType::kF32, {2}}}));
  const auto index = [&](const std::string& map) {
    Write("model.safetensors.index.json", R"({"metadata": {}, "weight_map": )" + map + "}");
    return Refusal();
  };
  EXPECT_EQ(index(R"({"a": "part/one.safetensors", "b": "./two.safetensors"})"), "taken");
  EXPECT_EQ(index(R"({"b": "part/one.safetensors", "a": "two.safetensors"})"), "taken");
  EXPECT_EQ(
      index(
          R"({"a": "part/one.safetensors", "b": "two.safetensors", "r.inv_freq": "two.safetensors"})"),
      "taken");
  EXPECT_THAT(index(R"({"a": "part/one.safetensors", "c": "two.safetensors"})"), HasSubstr("'c'"));
}

TEST_F(HuggingFaceSourceTest, OneFileIsAStep) {
  Write("config.json", "{}");
  Write("x.safetensors", Safetensors({{"a", DType::kF32, {2}}}));
  const auto step = Read(path_ + "/x.safetensors");
  ASSERT_TRUE(step) << step.error().message;
  EXPECT_EQ(step->id, "x.safetensors");
  EXPECT_EQ(step->roots[0], path_);
  EXPECT_TRUE(step->facts.model_files.config());
  Write("x.txt", "text");
  EXPECT_FALSE(Read(path_ + "/x.txt"));
}

TEST_F(HuggingFaceSourceTest, ATrainersOutputHasCheckpoints) {
  const std::string tensors = Safetensors({{"a", DType::kF32, {2}}});
  for (const char* name : {"checkpoint-10/", "checkpoint-9/", "other/", ""}) {
    Write(std::string(name) + "model.safetensors", tensors);
  }
  const Place place = PlaceOf(path_).value();
  const auto found = source_->Find(place.root, place.directory);
  ASSERT_TRUE(found) << found.error().message;
  std::vector<std::string> ids;
  for (const StepCandidate& step : *found) {
    ids.push_back(step.id + " " + std::to_string(step.iteration));
    EXPECT_EQ(step.SavePath(), path_);
    EXPECT_TRUE(source_->Read(step, options_)) << step.id;
  }
  EXPECT_THAT(ids, ElementsAre("model 0", "checkpoint-10 10", "checkpoint-9 9"));
}

TEST_F(HuggingFaceSourceTest, DirectoriesThatAreNamedAsStepsAreSteps) {
  const std::string tensors = Safetensors({{"a", DType::kF32, {2}}});
  // The last two are runs: of a Trainer and of DeepSpeed, with a model of their own.
  for (const char* name :
       {"step-6/", "epoch_1/", "best/", "iter_1/", "iter_1/checkpoint-10/", "iter_2/"}) {
    Write(std::string(name) + "model.safetensors", tensors);
  }
  Write("iter_2/latest", "some_tag");
  const Place place = PlaceOf(path_).value();
  const auto found = source_->Find(place.root, place.directory);
  ASSERT_TRUE(found) << found.error().message;
  std::vector<std::string> ids;
  for (const StepCandidate& step : *found) ids.push_back(step.id);
  EXPECT_THAT(ids, ElementsAre("epoch_1", "step-6"));
  for (const auto& [name, save] : {std::pair("/step-6", ""), std::pair("/best", "/best")}) {
    const Place alone = PlaceOf(path_ + name).value();
    const auto one = source_->Find(alone.root, alone.directory);
    ASSERT_TRUE(one && one->size() == 1) << name;
    EXPECT_EQ(one->front().SavePath(), path_ + save);
  }
}

TEST_F(HuggingFaceSourceTest, TheHubsCacheWorks) {
  const std::string hub = directory_.path() + "/models--me--it";
  directory_.Write("models--me--it/blobs/abc", Safetensors({{"a", DType::kF32, {2}}}));
  directory_.Write("models--me--it/blobs/def", "{}");
  files::create_directories(hub + "/snapshots/0123");
  files::create_symlink("../../blobs/abc", hub + "/snapshots/0123/model.safetensors");
  files::create_symlink("../../blobs/def", hub + "/snapshots/0123/config.json");
  for (const std::string& path : {hub, hub + "/snapshots/0123"}) {
    const auto step = Read(path);
    ASSERT_TRUE(step) << step.error().message;
    EXPECT_EQ(step->id, "0123");
    EXPECT_EQ(step->roots[0], hub);
    EXPECT_TRUE(step->facts.model_files.config());
  }
}

}  // namespace
}  // namespace ckptfs
