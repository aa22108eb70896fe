// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/module_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"

namespace ckptfs::huggingface {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::string_view kText =
    "# a comment\n"
    "class AForCausalLM a model\n"
    "class BForCausalLM b model\n"
    "+ model.{embed,norm}.weight\n"
    "+ model.layers.#.q.weight\n"
    "t lm_head.weight\n"
    "t decoder.embed_tokens.weight\n"
    "? model.layers.#.q.bias\n"
    "class CForCausalLM c model\n"
    "+ model.norm.weight\n"
    "+ head.weight\n"
    "~ model.scale\n"
    "? model.experts.up\n"
    "x model.experts.down\n"
    "f model.norm.weight\n"
    "f head.weight\n"
    "F model.experts.#.up.weight\n";

ModuleNames Of(std::string_view name, std::string_view type = "") {
  return FindModuleNames(kText, name, type).value().value();
}

TEST(ModuleNamesTest, ClassesOfOneBlockShareItsNames) {
  EXPECT_THAT(Of("AForCausalLM").required,
              ElementsAre("model.embed.weight", "model.layers.#.q.weight", "model.norm.weight"));
  EXPECT_EQ(Of("BForCausalLM").required, Of("AForCausalLM").required);
  EXPECT_THAT(Of("BForCausalLM").tied,
              ElementsAre("decoder.embed_tokens.weight", "lm_head.weight"));
  EXPECT_EQ(Of("CForCausalLM").in_files.size(), 2u);
  EXPECT_TRUE(Of("CForCausalLM").optional.contains("model.scale"));
  EXPECT_TRUE(Of("CForCausalLM").optional_in_files.contains("model.scale"));
  EXPECT_FALSE(FindModuleNames(kText, "DForCausalLM", "d").value());
  EXPECT_FALSE(FindModuleNames(kText, "", "").value());
}

TEST(ModuleNamesTest, OfAnotherHeadTheBaseModelsNamesCount) {
  const ModuleNames names = Of("CForTokenClassification", "c");
  EXPECT_THAT(names.required, ElementsAre("model.norm.weight"));
  EXPECT_TRUE(names.base_alone);
  EXPECT_THAT(names.tied, IsEmpty());
}

TEST(ModuleNamesTest, WhatIsMissingOrNotKnownIsNamed) {
  const std::vector<std::string> all = {"model.embed.weight", "model.layers.10.q.weight",
                                        "model.layers.10.q.bias", "model.norm.weight"};
  EXPECT_THAT(CompareNames(Of("AForCausalLM"), all, true).missing, IsEmpty());
  EXPECT_THAT(CompareNames(Of("AForCausalLM"), all, true).ignored, IsEmpty());
  EXPECT_THAT(CompareNames(Of("AForCausalLM"), all, false).missing, ElementsAre("lm_head.weight"));
  const std::vector<std::string> other = {"embed.weight", "layers.0.wq.weight", "norm.weight",
                                          "rotary.inv_freq"};
  const NamesFound found = CompareNames(Of("AForCausalLM"), other, true);
  EXPECT_THAT(found.missing, ElementsAre("model.layers.#.q.weight"));
  EXPECT_THAT(found.ignored, ElementsAre("layers.0.wq.weight"));
}

// from_pretrained adds the base model's prefix, and takes it off.
TEST(ModuleNamesTest, NamesOfTheBaseModelAloneAreItsNames) {
  const std::vector<std::string> bare = {"embed.weight", "layers.0.q.weight", "norm.weight"};
  EXPECT_THAT(CompareNames(Of("AForCausalLM"), bare, true).missing, IsEmpty());
  EXPECT_THAT(CompareNames(Of("AForCausalLM"), bare, true).ignored, IsEmpty());
}

TEST(ModuleNamesTest, NamesOfModulesAndOfFilesAreToldApart) {
  const std::vector<std::string> files = {"model.norm.weight", "head.weight",
                                          "model.experts.3.up.weight"};
  EXPECT_THAT(CompareNames(Of("CForCausalLM"), files, true).of_modules, IsEmpty());
  const std::vector<std::string> modules = {"model.norm.weight", "head.weight", "model.experts.up"};
  EXPECT_THAT(CompareNames(Of("CForCausalLM"), modules, true).of_modules,
              ElementsAre("model.experts.up"));
  EXPECT_THAT(CompareNames(Of("CForCausalLM"), modules, true).not_loaded, IsEmpty());
  const std::vector<std::string> lost = {"model.norm.weight", "head.weight", "model.experts.down"};
  EXPECT_THAT(CompareNames(Of("CForCausalLM"), lost, true).not_loaded,
              ElementsAre("model.experts.down"));
}

TEST(ModuleNamesTest, NumbersAreWholeComponents) {
  EXPECT_EQ(TemplateOfName("model.layers.12.w1.weight"), "model.layers.#.w1.weight");
  EXPECT_EQ(TemplateOfName("0"), "#");
  EXPECT_EQ(TemplateOfName(""), "");
}

// DeepSeek's queries come out of a latent, or do not: q_lora_rank says which tensors there are.
TEST(ModuleNamesTest, ASettingOfTheConfigSaysWhichNamesAreThere) {
  constexpr std::string_view text = "class A a m\n~ m.{a,b,q}\n! rank m.{a,b}\n0 rank m.q\n= m.w\n";
  const auto missing = [&](std::set<std::string, std::less<>> nulls,
                           std::vector<std::string> names) {
    ModuleNames wanted = FindModuleNames(text, "A", "").value().value();
    wanted.Require(nulls);
    return CompareNames(wanted, names, true).missing;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(missing({}, {"m.a", "m.b", "m.w"}), Names());
  EXPECT_EQ(missing({}, {"m.q", "m.w"}), (Names{"m.a", "m.b"}));
  EXPECT_EQ(missing({"rank"}, {"m.q", "m.w"}), Names());
  EXPECT_EQ(missing({"rank", "other"}, {"m.a", "m.b", "m.w"}), Names{"m.q"});
  EXPECT_FALSE(FindModuleNames("class A a m\n! rank\n", "A", ""));
}

TEST(ModuleNamesTest, AnotherFormIsRefused) {
  EXPECT_FALSE(FindModuleNames("class A a\n", "A", ""));
  EXPECT_FALSE(FindModuleNames("class A a m\n- x\n", "A", ""));
}

// Every class of the shipped text can be read, and a few are as transformers has them.
TEST(ModuleNamesTest, TheShippedTextIsOfThatForm) {
  std::string_view text = ModuleNamesText();
  size_t classes = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.starts_with("class ")) continue;
    const std::string name(line.substr(6, line.find(' ', 6) - 6));
    const auto found = FindModuleNames(ModuleNamesText(), name, "");
    ASSERT_TRUE(found) << found.error().message;
    ASSERT_TRUE(*found) << name;
    EXPECT_FALSE((*found)->optional.empty() && (*found)->required.empty() && (*found)->tied.empty())
        << name;
    ++classes;
  }
  EXPECT_GT(classes, 150u);
  const auto llama = FindModuleNames(ModuleNamesText(), "LlamaForCausalLM", "").value().value();
  EXPECT_TRUE(llama.required.contains("model.layers.#.self_attn.q_proj.weight"));
  EXPECT_TRUE(llama.optional.contains("model.layers.#.self_attn.q_proj.bias"));
  EXPECT_TRUE(llama.tied.contains("lm_head.weight"));
  auto deepseek = FindModuleNames(ModuleNamesText(), "DeepseekV3ForCausalLM", "").value().value();
  deepseek.Require({"q_lora_rank"});
  EXPECT_TRUE(deepseek.in_files.contains("model.layers.#.self_attn.q_proj.weight"));
  EXPECT_FALSE(deepseek.in_files.contains("model.layers.#.self_attn.q_b_proj.weight"));
  const auto mixtral = FindModuleNames(ModuleNamesText(), "MixtralForCausalLM", "").value().value();
  EXPECT_TRUE(mixtral.optional.contains("model.layers.#.mlp.experts.gate_up_proj"));
  EXPECT_TRUE(
      mixtral.optional_in_files.contains("model.layers.#.block_sparse_moe.experts.#.w1.weight"));
}

// An untied head that files call otherwise (GPT-NeoX) is there under the files' name.
TEST(ModuleNamesTest, AHeadThatFilesCallOtherwiseIsThere) {
  const auto wanted =
      FindModuleNames("class A a a\nt lm_head.weight\nf embed_out.weight\n= a.w\n", "A", "a");
  ASSERT_TRUE(wanted.has_value() && *wanted);
  const auto missing = [&](std::vector<std::string> names) {
    return CompareNames(**wanted, names, false).missing;
  };
  EXPECT_TRUE(missing({"a.w", "embed_out.weight"}).empty());
  EXPECT_TRUE(missing({"a.w", "lm_head.weight"}).empty());
  EXPECT_EQ(missing({"a.w"}).size(), 1u);
}

}  // namespace
}  // namespace ckptfs::huggingface
