// SPDX-License-Identifier: Apache-2.0
#include "formats/tools/model_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "core/io/file_root.h"
#include "formats/tools/config_text.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> Names(const ModelFiles& files) {
  std::vector<std::string> out;
  for (const ModelFile& file : files.files) out.push_back(file.name);
  return out;
}

TEST(ConfigTextTest, ReadsWhatMattersToWeights) {
  const auto facts = ReadConfigFacts(
      R"({"architectures": ["LlamaForCausalLM", 3], "model_type": "llama", "tie_word_embeddings": false,
          "quantization_config": {"bits": 4}, "transformers_version": 5})");
  ASSERT_TRUE(facts);
  EXPECT_THAT(facts->architectures, ElementsAre("LlamaForCausalLM"));
  EXPECT_EQ(facts->tied, std::optional(false));
  EXPECT_EQ(facts->quantisation, "unknown");
  EXPECT_EQ(facts->version, "");
  EXPECT_FALSE(ReadConfigFacts("[1]"));
  EXPECT_FALSE(ReadConfigFacts("{\"a\": "));
  EXPECT_FALSE(ReadConfigFacts(std::string(100000, '[')));
  // The parser takes a NUL for the end; what replaces dtypes would walk on.
  for (const char* behind : {"", "\"", "}}}", " "}) {
    EXPECT_FALSE(ReadConfigFacts(std::string("{\"dtype\": \"float32\"}") + '\0' + behind))
        << behind;
  }
  EXPECT_TRUE(ReadModuleFolders(std::string("[{\"path\": \"a\"}]") + '\0').empty());
}

// As Python's json module writes what has no JSON (Mamba2's time_step_limit).
TEST(ConfigTextTest, WhatPythonTakesIsTaken) {
  for (const char* value : {"[0.0, Infinity]", "-Infinity", "NaN", "1e999", "\"\\ud800\""}) {
    const auto facts =
        ReadConfigFacts(std::string(R"({"model_type": "x", "limit": )") + value + "}");
    ASSERT_TRUE(facts) << value;
    EXPECT_EQ(facts->model_type, "x");
  }
  EXPECT_FALSE(ReadConfigFacts(R"({"limit": Infinit})"));
}

TEST(ConfigTextTest, OnlyTheDTypesOfWeightsAreReplaced) {
  const std::string config =
      R"({ "dtype":"float32", "a": ["dtype", "float32"], "x_config": ["dtype", "float32"],
  "text_config": {"torch_dtype": "float16", "deep_config": {"dtype": "float32"}, "q": "a\"dtype\":\"float32"},
  "quantization_config": {"dtype": "float32"}, "other": {"dtype": "float32"},
  "torch_dtype": null, "n": 1e-05 })";
  EXPECT_EQ(WithDType(config, DType::kBF16),
            R"({ "dtype":"bfloat16", "a": ["dtype", "float32"], "x_config": ["dtype", "float32"],
  "text_config": {"torch_dtype": "bfloat16", "deep_config": {"dtype": "float32"}, "q": "a\"dtype\":\"float32"},
  "quantization_config": {"dtype": "float32"}, "other": {"dtype": "float32"},
  "torch_dtype": null, "n": 1e-05 })");
  EXPECT_EQ(WithDType(R"({"dtype": "float32"})", DType::kF32), R"({"dtype": "float32"})");
  EXPECT_EQ(WithDType(R"({"dtype": "int8"})", DType::kF32), R"({"dtype": "int8"})");
}

// Values of transformers 5's keys under those of transformers 4; nothing else changes.
TEST(ConfigTextTest, OlderReleasesFindTheirKeys) {
  EXPECT_EQ(WithOlderKeys(R"({"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}
})"),
            R"({"rope_parameters": {"rope_theta": 77.0, "rope_type": "default"},
  "rope_theta": 77.0
})");
  EXPECT_EQ(
      WithOlderKeys(
          R"({"a": [{}, "}"], "text_config": {"rope_parameters": {"rope_theta": 5, "rope_type": "yarn", "factor": 2.5}}})"),
      R"({"a": [{}, "}"], "text_config": {"rope_parameters": {"rope_theta": 5, "rope_type": "yarn", "factor": 2.5},
  "rope_theta": 5,
  "rope_scaling": {"factor":2.5,"rope_type":"yarn"}}})");
  EXPECT_EQ(WithOlderKeys(R"({"model_type": "qwen3_moe", "num_local_experts": 4})"),
            R"({"model_type": "qwen3_moe", "num_local_experts": 4,
  "num_experts": 4})");
  for (const char* as_it_is :
       {"{}", "{ }", R"({"model_type": "mixtral", "num_local_experts": 4})",
        R"({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 77.0}})",
        R"({"rope_parameters": {"full_attention": {"rope_theta": 77.0}}})",
        R"({"quantization_config": {"rope_parameters": {"rope_theta": 77.0}}})",
        R"({"rope_parameters": [1], "text_config": {}, "b_config": [{}]})"}) {
    EXPECT_EQ(WithOlderKeys(as_it_is), as_it_is);
  }
}

// The entry that says how weights are packed goes; the rest stays byte for byte.
TEST(ConfigTextTest, DecodedWeightsHaveAPlainConfig) {
  const std::string packed =
      R"("quantization_config": {"quant_method": "fp8", "x": [1, {"}": ","}]})";
  for (const auto& [config, plain] :
       {std::pair(R"({ "a": 1,
  Q,
  "b": 2 })",
                  R"({ "a": 1,
  "b": 2 })"),
        std::pair(R"({Q, "b": 2})", R"({"b": 2})"),
        std::pair("{ \"b\": [2], Q\n}", "{ \"b\": [2]\n}"), std::pair("{Q}", "{}"),
        std::pair(R"({"a": {Q}})", R"({"a": {Q}})"), std::pair(R"({"a": 1, Q, Q})", R"({"a": 1})"),
        std::pair(R"({Q, Q})", "{}"), std::pair(R"({"b": "Q"})", R"({"b": "Q"})")}) {
    const auto filled = [&](std::string text) {
      const bool quoted = text.find("\"Q\"") != std::string::npos;
      for (size_t at = 0; !quoted && (at = text.find('Q', at)) != std::string::npos;
           at += packed.size()) {
        text.replace(at, 1, packed);
      }
      return text;
    };
    const std::string got = WithoutQuantisation(filled(config));
    EXPECT_TRUE(ReadConfigFacts(got)) << got;
    const std::string want =
        std::string_view(config).starts_with(R"({"a": {Q)") ? filled(plain) : plain;
    if (std::string_view(config) == "{Q, Q}") {
      EXPECT_TRUE(ReadConfigFacts(got)->quantisation.empty()) << got;
    } else {
      EXPECT_EQ(got, want) << config;
    }
  }
}

TEST(ModelFilesTest, NamesOfModelFiles) {
  for (const char* name : {"config.json", "tokenizer.model", "vocab.txt", "chat_template.jinja",
                           "modeling_new.py", "generation_config.json"}) {
    EXPECT_TRUE(IsModelFile(name)) << name;
  }
  for (const char* name : {"model.safetensors.index.json", "trainer_state.json", "zero_to_fp32.py",
                           "ds_config.json", "training_args.bin", ".model", "README.md", ""}) {
    EXPECT_FALSE(IsModelFile(name)) << name;
  }
}

TEST(ModelFilesTest, AreCarriedAsTextsOrBlobs) {
  const TemporaryDirectory directory;
  const std::string long_text(100000, 'x');
  directory.Write("tag/data", "0123");
  directory.Write("config.json", "{}");
  directory.Write("tokenizer.json", long_text);
  directory.Write("vocab.txt", "not \xff UTF-8");
  directory.Write("merges.txt", "#version\n");
  Assembler assembler;
  const auto root = std::make_shared<FileRoot>(directory.path());
  ASSERT_TRUE(assembler.AddFile(assembler.AddRoot(root), "tag/data"));
  const auto carried = CarryModelFiles(assembler, root, "tag/");
  ASSERT_TRUE(carried) << carried.error().message;
  const StepModel step = std::move(assembler).Finish().value();
  const ModelFiles& files = step.facts.model_files;
  EXPECT_EQ(Names(files), Names(*carried));
  EXPECT_THAT(Names(files),
              ElementsAre("config.json", "merges.txt", "tokenizer.json", "vocab.txt"));
  EXPECT_EQ(*files.config(), "{}");
  EXPECT_EQ(*files.Find("merges.txt")->text(), "#version\n");
  for (const char* name : {"tokenizer.json", "vocab.txt"}) {
    ASSERT_EQ(files.Find(name)->text(), nullptr);
    EXPECT_EQ(step.blob(std::get<BlobIndex>(files.Find(name)->body)).path, name);
  }
}

std::vector<std::string> LeftOutOf(Assembler& assembler) {
  std::vector<std::string> texts;
  for (const LeftOut& one : assembler.header().left_out) texts.push_back(LeftOutText(one));
  return texts;
}

TEST(ModelFilesTest, OfFoldersThoseThatLoadersLookInto) {
  const TemporaryDirectory directory;
  directory.Write("data", "0123");
  directory.Write("config.json", "{}");
  directory.Write("modules.json", R"([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"},
      {"path": "../out"}, {"path": "."}, {"path": "a/b"}, {"path": "missing"}, 7])");
  directory.Write("1_Pooling/config.json", "{\"a\": 1}");
  directory.Write("2_Dense/config.json", "not JSON, and nobody's business");
  directory.Write("2_Dense/model.safetensors", "weights");
  directory.Write("2_Dense/deep/config.json", "{}");
  directory.Write("additional_chat_templates/tool.jinja", "{{ tools }}");
  directory.Write("onnx/config.json", "{}");
  directory.Write("a/b/config.json", "{}");
  Assembler assembler;
  const auto root = std::make_shared<FileRoot>(directory.path());
  ASSERT_TRUE(assembler.AddFile(assembler.AddRoot(root), "data"));
  const auto carried = CarryModelFiles(assembler, root, "");
  ASSERT_TRUE(carried) << carried.error().message;
  const auto names =
      ElementsAre("1_Pooling/config.json", "2_Dense/config.json",
                  "additional_chat_templates/tool.jinja", "config.json", "modules.json");
  EXPECT_THAT(Names(*carried), names);
  EXPECT_THAT(LeftOutOf(assembler),
              ElementsAre(HasSubstr("2_Dense/deep"), HasSubstr("2_Dense/model.safetensors")));
  const StepModel step = std::move(assembler).Finish().value();
  const ModelFiles& files = step.facts.model_files;
  EXPECT_THAT(Names(files), names);
  EXPECT_EQ(*files.Find("1_Pooling/config.json")->text(), "{\"a\": 1}");
  const auto given = ReadModelFiles(directory.path());
  ASSERT_TRUE(given) << given.error().message;
  EXPECT_THAT(Names(*given), names);
  for (const char* path : {"../x.json", "a/../x.json", "/x.json", "a/.x.json", "a/x.bin", "x.json",
                           "a/b/c.json", ".git/config.json", "a/m.safetensors.index.json"}) {
    EXPECT_FALSE(IsFolderFile(path)) << path;
  }
}

TEST(ModelFilesTest, AConfigThatCannotBeCarriedLeavesANote) {
  const TemporaryDirectory directory;
  directory.Write("broken/config.json", "{");
  directory.Write("broken/long/config.json", std::string(2 << 20, ' '));
  Assembler assembler;
  const auto root = std::make_shared<FileRoot>(directory.path());
  const auto carried = CarryModelFiles(assembler, root, "broken/long/");
  ASSERT_TRUE(carried) << carried.error().message;
  EXPECT_TRUE(carried->files.empty());
  EXPECT_THAT(LeftOutOf(assembler),
              ElementsAre(HasSubstr("long/config.json"), HasSubstr("broken/config.json")));
  EXPECT_TRUE(assembler.header().facts.model_files.files.empty());
}

TEST(ModelFilesTest, OfADirectoryThatAMountNames) {
  const TemporaryDirectory directory;
  EXPECT_FALSE(ReadModelFiles(directory.path()));
  directory.Write("config.json", "{}");
  directory.Write("model.safetensors", "not one of them");
  directory.Write("tokenizer.json", std::string(100000, 'x'));
  const auto files = ReadModelFiles(directory.path());
  ASSERT_TRUE(files) << files.error().message;
  EXPECT_THAT(Names(*files), ElementsAre("config.json", "tokenizer.json"));
  EXPECT_EQ(files->Find("tokenizer.json")->text()->size(), 100000u);
  EXPECT_FALSE(ReadModelFiles(directory.path() + "/missing"));
}

}  // namespace
}  // namespace ckptfs
