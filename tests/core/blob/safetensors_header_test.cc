// SPDX-License-Identifier: Apache-2.0

#include "core/blob/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ckptfs {
namespace {

using ::testing::HasSubstr;

std::string Prefixed(std::string json) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>((json.size() >> (8 * i)) & 0xff);
  return out + json;
}

Result<SafetensorsHeader> Parse(const std::string& json, uint64_t data) {
  std::string head = Prefixed(json);
  return ParseSafetensorsHeader(head, head.size() + data);
}

void ExpectRefused(const std::string& json, uint64_t data, const std::string& rule) {
  auto header = Parse(json, data);
  ASSERT_FALSE(header.has_value()) << json.substr(0, 200);
  EXPECT_EQ(header.error().code, ErrorCode::kInvalid);
  EXPECT_THAT(header.error().message, HasSubstr(rule)) << json.substr(0, 200);
}

std::string Tensor(const std::string& rest) { return "{\"a\":{" + rest + "}}"; }

TEST(SafetensorsHeaderTest, ReadsInFileOrder) {
  auto header = Parse(R"( {"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},
      "__metadata__":{"k":"v","\u00e9":"\n"}, "e":{"data_offsets":[2,2],"shape":[0,9],"dtype":"U8"},
      "a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}}    )",
                      10);
  ASSERT_TRUE(header.has_value()) << header.error().message;
  ASSERT_EQ(header->entries.size(), 3u);
  EXPECT_EQ(header->entries[0].name, "a");
  EXPECT_EQ(header->entries[1].name, "e");
  EXPECT_EQ(header->entries[2].name, "b");
  EXPECT_EQ(header->entries[2].begin, 2u);
  EXPECT_EQ(header->metadata.at("k"), "v");
  EXPECT_EQ(header->metadata.at("\xc3\xa9"), "\n");
  EXPECT_TRUE(Parse("{}", 0).has_value());
}

TEST(SafetensorsHeaderTest, RefusesImpossibleLengths) {
  auto length = [](uint64_t n, uint64_t file) {
    std::string eight;
    for (int i = 0; i < 8; ++i) eight += static_cast<char>((n >> (8 * i)) & 0xff);
    return SafetensorsHeaderLength(eight, file);
  };
  EXPECT_EQ(length(10, 18).value(), 10u);
  EXPECT_FALSE(length(11, 18).has_value());
  EXPECT_FALSE(length(~uint64_t{0}, ~uint64_t{0}).has_value());
  EXPECT_FALSE(length(uint64_t{1} << 63, 100).has_value());
  EXPECT_THAT(length(100'000'001, uint64_t{1} << 40).error().message, HasSubstr("100,000,000"));
  EXPECT_TRUE(length(100'000'000, uint64_t{1} << 40).has_value());
  EXPECT_FALSE(length(0, 7).has_value());
  EXPECT_FALSE(SafetensorsHeaderLength("1234567", 100).has_value());
  EXPECT_FALSE(ParseSafetensorsHeader(Prefixed("{}").substr(0, 9), 10).has_value());
}

TEST(SafetensorsHeaderTest, RefusesWhatIsNotTheGrammar) {
  for (std::string json :
       {"", " ", "[]", "5", "\"x\"", "{", "{}{}", "{\"a\":1}", "{\"a\":null}", "{\"a\":[]}",
        "{\"a\":{}}", "{\"__metadata__\":5}", "{\"__metadata__\":{\"k\":1}}",
        "{\"__metadata__\":{\"k\":{}}}", "nul", "{\"a\"}"}) {
    EXPECT_FALSE(Parse(json, 0).has_value()) << json;
  }
  ExpectRefused(std::string("{\"a\xff\":{}}"), 0, "not JSON");
  ExpectRefused(std::string("{}") + '\0' + "{", 0, "a NUL byte");
  ExpectRefused("\xEF\xBB\xBF{}", 0, "a byte-order mark");
  ExpectRefused(std::string(100000, '['), 0, "wrong place");
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  ExpectRefused(deep, 0, "unknown key 'a'");
  ExpectRefused(Tensor(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), 4, "wrong place");
  ExpectRefused(Tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)"), 4,
                "unknown key");
}

TEST(SafetensorsHeaderTest, RefusesDuplicates) {
  std::string one = R"("dtype":"U8","shape":[1],"data_offsets":[0,1])";
  ExpectRefused("{\"a\":{" + one + "},\"a\":{" + one + "}}", 1, "two keys 'a'");
  ExpectRefused(R"({"__metadata__":{"k":"1","k":"2"}})", 0, "two keys 'k'");
  ExpectRefused(R"({"__metadata__":{},"__metadata__":{}})", 0, "two keys '__metadata__'");
  ExpectRefused(Tensor(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])"), 1,
                "two keys 'dtype'");
}

TEST(SafetensorsHeaderTest, RefusesBadNumbersAndTypes) {
  auto tensor = [](std::string dtype, std::string shape, std::string offsets) {
    return Tensor("\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
  };
  ExpectRefused(tensor("\"F7\"", "[1]", "[0,4]"), 4, "unknown dtype 'F7'");
  ExpectRefused(tensor("4", "[1]", "[0,4]"), 4, "wrong place");
  ExpectRefused(tensor("\"F32\"", "[-1]", "[0,4]"), 4, "negative");
  ExpectRefused(tensor("\"F32\"", "[1.0]", "[0,4]"), 4, "not an integer");
  ExpectRefused(tensor("\"F32\"", "[1e0]", "[0,4]"), 4, "not an integer");
  ExpectRefused(tensor("\"F32\"", "[18446744073709551616]", "[0,4]"), 4, "not an integer");
  ExpectRefused(tensor("\"F32\"", "[\"1\"]", "[0,4]"), 4, "wrong place");
  ExpectRefused(tensor("\"F32\"", "[1]", "[0]"), 4, "two numbers");
  ExpectRefused(tensor("\"F32\"", "[1]", "[0,4,4]"), 4, "two numbers");
  ExpectRefused(tensor("\"F32\"", "[1]", "[4,0]"), 4, "hole");
  ExpectRefused(tensor("\"F32\"", "[4294967296,4294967296,4]", "[0,0]"), 0, "tensor 'a'");
  ExpectRefused(tensor("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "");
  ExpectRefused(tensor("\"F32\"", "[2]", "[0,4]"), 4, "do not fit");
  ExpectRefused(tensor("\"F4\"", "[3]", "[0,2]"), 2, "do not fit");
  std::string many = "[";
  for (int i = 0; i < 100; ++i) many += "1,";
  ExpectRefused(tensor("\"U8\"", many + "1]", "[0,1]"), 1, "64 dimensions");
}

TEST(SafetensorsHeaderTest, RefusesHolesOverlapsAndWrongEnds) {
  auto two = [](std::string a, std::string b) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b + "}}";
  };
  EXPECT_TRUE(Parse(two("[4,8]", "[0,4]"), 8).has_value());
  ExpectRefused(two("[0,4]", "[5,9]"), 9, "hole or overlaps");
  ExpectRefused(two("[0,4]", "[3,7]"), 7, "hole or overlaps");
  ExpectRefused(two("[0,4]", "[0,4]"), 4, "hole or overlaps");
  ExpectRefused(two("[1,5]", "[5,9]"), 9, "hole or overlaps");
  ExpectRefused(two("[0,4]", "[4,8]"), 9, "8 bytes, but the file has 9");
  ExpectRefused(two("[0,4]", "[4,8]"), 7, "8 bytes, but the file has 7");
  ExpectRefused("{}", 1, "0 bytes, but the file has 1");
}

TEST(SafetensorsHeaderTest, RenderedHeadersParseAndAreAligned) {
  std::map<std::string, std::string> metadata{{"format", "pt"}, {"q\"\\\n", "\x01\xc3\xa9"}};
  std::vector<SafetensorsEntry> entries;
  for (int count : {0, 1, 2, 60, 500}) {
    while (static_cast<int>(entries.size()) < count) {
      uint64_t i = entries.size();
      entries.push_back({.name = "layer\t\"" + std::to_string(i),
                         .dtype = static_cast<DType>(i % 19),
                         .shape = Shape(i % 4, i % 7)});
    }
    auto size = SafetensorsHeaderSize(metadata, entries);
    auto rendered = RenderSafetensorsHeader(metadata, entries);
    ASSERT_TRUE(rendered.has_value()) << rendered.error().message;
    EXPECT_EQ(rendered->size(), size.value());
    EXPECT_EQ(rendered->size() % 4096, 0u);
    uint64_t data = entries.empty() ? 0 : entries.back().end;
    auto parsed = ParseSafetensorsHeader(*rendered, rendered->size() + data);
    ASSERT_TRUE(parsed.has_value()) << parsed.error().message;
    EXPECT_EQ(parsed->metadata, metadata);
    EXPECT_EQ(parsed->entries.size(), entries.size());
    for (const SafetensorsEntry& entry : parsed->entries) {
      const SafetensorsEntry& want = entries.at(std::stoul(entry.name.substr(7)));
      EXPECT_EQ(std::tie(entry.dtype, entry.shape, entry.begin, entry.end),
                std::tie(want.dtype, want.shape, want.begin, want.end));
    }
  }
}

TEST(SafetensorsHeaderTest, WhatCannotBeRenderedIsRefused) {
  std::vector<SafetensorsEntry> entries{{.name = "c", .dtype = DType::kC128, .shape = {1}}};
  EXPECT_THAT(RenderSafetensorsHeader({}, entries).error().message, HasSubstr("no dtype"));
  EXPECT_FALSE(SafetensorsHeaderSize({}, entries).has_value());
  entries = {{.name = "a", .shape = {1}}, {.name = "a", .shape = {1}}};
  EXPECT_THAT(RenderSafetensorsHeader({}, entries).error().message, HasSubstr("two tensors"));
  entries = {{.name = "a", .shape = {uint64_t{1} << 62, 4}}};
  EXPECT_FALSE(RenderSafetensorsHeader({}, entries).has_value());
}

}  // namespace
}  // namespace ckptfs
