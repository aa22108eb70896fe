// SPDX-License-Identifier: Apache-2.0
#include "formats/huggingface/names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/huggingface/shard_index.h"

namespace ckptfs::huggingface {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Chosen(std::vector<std::string> names) {
  const auto chosen = ChooseWeights(names);
  if (!chosen) return "refused: " + chosen.error().message;
  return *chosen ? (*chosen)->file : "nothing";
}

TEST(ChooseWeightsTest, FollowsTheOrderOfFromPretrained) {
  EXPECT_EQ(Chosen({"pytorch_model.bin", "model.safetensors.index.json", "model.safetensors"}),
            "model.safetensors");
  EXPECT_EQ(Chosen({"pytorch_model.bin", "model.safetensors.index.json"}),
            "model.safetensors.index.json");
  EXPECT_EQ(Chosen({"pytorch_model.bin.index.json", "pytorch_model.bin"}), "pytorch_model.bin");
  EXPECT_EQ(Chosen({"pytorch_model.bin.index.json", "config.json"}),
            "pytorch_model.bin.index.json");
  EXPECT_EQ(Chosen({"model.fp16.safetensors", "pytorch_model.bin"}), "pytorch_model.bin");
}

TEST(ChooseWeightsTest, OtherNamesAreNotWeights) {
  EXPECT_EQ(Chosen({"config.json", "model-00001-of-00002.safetensors", "model..safetensors",
                    "modelx.safetensors", "model.a.b.safetensors", "optimizer.pt"}),
            "nothing");
}

TEST(ChooseWeightsTest, AVariantAloneIsTakenAndOfSeveralNone) {
  EXPECT_EQ(Chosen({"model.fp16.safetensors", "pytorch_model.fp16.bin"}), "model.fp16.safetensors");
  EXPECT_EQ(Chosen({"model.safetensors.index.fp16.json"}), "model.safetensors.index.fp16.json");
  EXPECT_THAT(Chosen({"model.fp16.safetensors", "model.ema.safetensors"}), HasSubstr("refused"));
}

TEST(ChooseWeightsTest, AnAdapterIsTold) {
  const std::vector<std::string> names{"adapter_config.json", "adapter_model.safetensors"};
  const auto chosen = ChooseWeights(names);
  ASSERT_TRUE(chosen && *chosen);
  EXPECT_TRUE((*chosen)->adapter);
}

TEST(ShardIndexTest, ReadsTheWeightMapOnly) {
  const auto map = ParseShardIndex(
      R"({"metadata": {"total_size": 1e3, "weight_map": {"x": "../y"}}, "more": [["weight_map"]],
          "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "other"}})");
  ASSERT_TRUE(map) << map.error().message;
  EXPECT_EQ(*map, (WeightMap{{"a", "model-00001-of-00002.safetensors"}, {"b", "other"}}));
}

// Each loads in transformers 5.23.
TEST(ShardIndexTest, FormsThatFromPretrainedLoadsAreRead) {
  const std::pair<std::string, WeightMap> cases[] = {
      {R"({"weight_map": {"a": "part/f", "b": "./g", "c": "x//./h"}})",
       {{"a", "part/f"}, {"b", "g"}, {"c", "x/h"}}},
      {R"({"weight_map": {"a": "f", "a": "g"}})", {{"a", "g"}}},
      {R"({"weight_map": {"x": "y"}, "weight_map": {"a": "f"}})", {{"a", "f"}}},
      {R"({"metadata": {"total_size": NaN, "x": -Infinity, "y": 1e999}, "weight_map": {"a": "f"}})",
       {{"a", "f"}}},
      {R"({"metadata": {"x": "\ud800"}, "weight_map": {"a": "f"}})", {{"a", "f"}}},
      {R"({"metadata": )" + std::string(200, '[') + std::string(200, ']') +
           R"(, "weight_map": {"a": "f"}})",
       {{"a", "f"}}}};
  for (const auto& [text, map] : cases) {
    const auto read = ParseShardIndex(text);
    ASSERT_TRUE(read) << text << ": " << read.error().message;
    EXPECT_EQ(*read, map) << text;
  }
}

TEST(ShardIndexTest, HostileIndexesAreRefusedByRule) {
  const std::pair<std::string, std::string> cases[] = {
      {R"({"weight_map": {"a": "../x"}})", "same directory"},
      {R"({"weight_map": {"a": "/etc/shadow"}})", "same directory"},
      {R"({"weight_map": {"a": ".."}})", "same directory"},
      {R"({"weight_map": {"a": ""}})", "same directory"},
      {R"({"weight_map": {"a": "x\u0000y"}})", "same directory"},
      {std::string(R"({"weight_map": {"a": "f"}})") + '\0' + "}", "a NUL byte"},
      {"\xEF\xBB\xBF"
       R"({"weight_map": {"a": "f"}})",
       "a byte-order mark"},
      {R"({"weight_map": {"a": "x/../../y"}})", "same directory"},
      {R"({"weight_map": {"a": "x/"}})", "same directory"},
      {R"({"weight_map": {"a": "./"}})", "same directory"},
      {R"({"weight_map": {"a": "f"}, "weight_map": 3})", "not an object"},
      {R"({"weight_map": {"a": 1}})", "does not have the name of a file"},
      {R"({"weight_map": {"a": {"b": "f"}}})", "does not have the name of a file"},
      {R"({"weight_map": ["a"]})", "not an object"},
      {R"({"weight_map": {"a": "f"}, "weight_map": {}})", "empty"},
      {R"({"weight_map": {}})", "empty"},
      {R"({"metadata": {}})", "its weight_map is missing"},
      {R"(["weight_map"])", "its weight_map is missing"},
      {R"({"weight_map": {"a": "f"})", "not JSON"},
      {std::string(100000, '['), "weight_map"},
      {R"({"x": )" + std::string(100000, '['), "nested"}};
  for (const auto& [text, rule] : cases) {
    const auto map = ParseShardIndex(text);
    ASSERT_FALSE(map) << text.substr(0, 60);
    EXPECT_THAT(map.error().message, HasSubstr(rule)) << text.substr(0, 60);
  }
}

TEST(ShardIndexTest, ShardsHoldAtMostTheLimitAndLargeTensorsStandAlone) {
  const std::vector<uint64_t> sizes{4, 4, 2, 11, 1, 10, 0};
  EXPECT_THAT(SplitShards(sizes, 10), ElementsAre(3, 1, 1, 2));
  EXPECT_THAT(SplitShards(std::vector<uint64_t>{1, 2}, 10), ElementsAre(2));
  EXPECT_THAT(SplitShards(std::vector<uint64_t>{}, 10), ElementsAre());
}

TEST(ShardIndexTest, NamesAndTextAreThoseOfTransformers) {
  EXPECT_EQ(ShardName(0, 1), "model.safetensors");
  EXPECT_EQ(ShardName(1, 3), "model-00002-of-00003.safetensors");
  EXPECT_EQ(PrintShardIndex({{"b", "f"}, {"a", "g"}}, 12, 3).value(),
            "{\n  \"metadata\": {\n    \"total_parameters\": 3,\n    \"total_size\": 12\n  },\n"
            "  \"weight_map\": {\n    \"a\": \"g\",\n    \"b\": \"f\"\n  }\n}\n");
  EXPECT_FALSE(PrintShardIndex({{"\xff", "f"}}, 1, 1));
}

TEST(HuggingFaceNamesTest, AShardSaysSoInItsName) {
  const auto said = [](std::string_view name) {
    const auto number = ShardNumberOf(name);
    return number ? std::pair(number->shard, number->shards) : std::pair<uint64_t, uint64_t>();
  };
  EXPECT_EQ(said("model-00001-of-00003.safetensors"), (std::pair<uint64_t, uint64_t>(1, 3)));
  EXPECT_EQ(said("pytorch_model.fp16-00012-of-100000.bin"),
            (std::pair<uint64_t, uint64_t>(12, 100'000)));
  for (const char* name :
       {"model.safetensors", "model-00001-of-00001.safetensors", "layer_01-model_00-of-01.pt",
        "1-of-3.safetensors", "model-0000x-of-00003.bin", "-of-", "", "-of-.bin",
        "-00001-of-99999999999999999999999.bin"}) {
    EXPECT_FALSE(ShardNumberOf(name)) << name;
  }
}

}  // namespace
}  // namespace ckptfs::huggingface
