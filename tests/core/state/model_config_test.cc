// SPDX-License-Identifier: Apache-2.0
#include "core/state/model_config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/io/file_root.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

FamilyVariables Parsed(std::string_view json) {
  const auto sizes = ParseModelConfig(json);
  EXPECT_TRUE(sizes) << json;
  return sizes.value_or(FamilyVariables{});
}

TEST(ModelConfigTest, ReadsTheSizesOfAttention) {
  EXPECT_EQ(Parsed(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "head_dim": null,
                       "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500,
                       "rope_scaling": {"num_attention_heads": 9}, "torch_dtype": "bfloat16"})"),
            (FamilyVariables{{"heads", 4}, {"hidden", 64}, {"kv_heads", 2}}));
  EXPECT_EQ(Parsed(R"({"n_head": 12, "n_embd": 768, "num_local_experts": 8})"),
            (FamilyVariables{{"experts", 8}, {"heads", 12}, {"hidden", 768}}));
  EXPECT_EQ(Parsed(R"({"vision_config": {"num_attention_heads": 16},
                       "text_config": {"num_attention_heads": 8, "x": [{"head_dim": 3}]}})"),
            (FamilyVariables{{"heads", 8}}));
}

TEST(ModelConfigTest, WhatIsNotASizeIsPassedOver) {
  EXPECT_EQ(Parsed(R"({"num_attention_heads": -4, "head_dim": 0, "hidden_size": 1e3,
                       "num_key_value_heads": "2", "num_experts": 99999999999,
                       "n_head": [7], "n_embd": {"n_embd": 5}, "n_routed_experts": true})"),
            FamilyVariables{});
  for (const char* bad : {"", "[]", "4", "{", R"({"a": 1)", R"({"a" 1})", "{}x"}) {
    EXPECT_FALSE(ParseModelConfig(bad)) << bad;
  }
  EXPECT_FALSE(ParseModelConfig(R"({"a": )" + std::string(100000, '[')));
  EXPECT_FALSE(ParseModelConfig(std::string("{}") + '\0' + "{"));
  EXPECT_FALSE(ParseModelConfig(R"({"a": )" + std::string(100, '[') + std::string(100, ']') + "}"));
}

class ModelConfigFileTest : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(Tag()); }
  std::string Tag() const { return root_.path() + "/run/save/global_step5"; }
  void Write(const std::string& directory, const std::string& text) {
    std::ofstream(root_.path() + "/" + directory + "/config.json") << text;
  }

  Result<std::optional<ModelConfig>> Find() {
    return FindModelConfig(FileRoot(root_.path()), "run/save/global_step5");
  }

  TemporaryDirectory root_;
};

TEST_F(ModelConfigFileTest, TheNearestThatSaysASizeCounts) {
  EXPECT_FALSE(*Find());
  Write("", R"({"num_attention_heads": 9})");  // three above: not the checkpoint's
  EXPECT_FALSE(*Find());
  Write("run", R"({"num_attention_heads": 4})");
  EXPECT_EQ((*Find())->sizes.at("heads"), 4);
  Write("run/save", R"({"num_attention_heads": 8})");
  EXPECT_EQ((*Find())->sizes.at("heads"), 8);
  Write("run/save/global_step5", "{}");
  EXPECT_EQ((*Find())->path, root_.path() + "/run/save/config.json");
  Write("run/save/global_step5", "no json");
  EXPECT_EQ((*Find())->sizes.at("heads"), 8);
}

TEST_F(ModelConfigFileTest, OtherThanASmallFileIsPassedOver) {
  const std::string path = Tag() + "/config.json";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(*Find());  // and nobody waits
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_FALSE(*Find());
  std::filesystem::remove(path);
  std::filesystem::create_symlink("/dev/zero", path);
  EXPECT_FALSE(*Find());
  std::filesystem::remove(path);
  Write("run/save/global_step5", R"({"n_head": 4, "x": ")" + std::string(4 << 20, 'x') + "\"}");
  EXPECT_FALSE(*Find());
  EXPECT_FALSE(*FindModelConfig(FileRoot("/"), ""));
}

TEST(ModelSizesTest, TheUserBeatsTheCheckpointAndThatTheConfig) {
  const ModelSizes sizes{{{"heads", 1}},
                         {{"heads", 2}, {"kv_heads", 2}},
                         {{"heads", 3}, {"kv_heads", 3}, {"head_dim", 3}},
                         "c"};
  EXPECT_EQ(sizes.All(), (FamilyVariables{{"head_dim", 3}, {"heads", 1}, {"kv_heads", 2}}));
  EXPECT_EQ(WithCommonSpellings({{"num_attention_heads", 8}}).at("heads"), 8);
  // Megatron-LM's default where queries are not grouped.
  EXPECT_FALSE(WithCommonSpellings({{"num_query_groups", 1}, {"group_query_attention", 0}})
                   .contains("kv_heads"));
  EXPECT_EQ(
      WithCommonSpellings({{"num_query_groups", 2}, {"group_query_attention", 1}}).at("kv_heads"),
      2);
}

}  // namespace
}  // namespace ckptfs
