// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/dialect.h"

#include <gtest/gtest.h>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

// A table of one rule.
Result<DialectTable> Table(std::string_view rule) {
  return DialectTable::Parse(StrCat("name = \"hf5\"\n[[map]]\nmodel_types = [\"m\"]\n", rule),
                             "hf5.toml");
}

MapRule RuleOf(std::string_view text) {
  const auto table = Table(text);
  EXPECT_TRUE(table.has_value()) << table.error().message;
  return *table->RulesOf("m").front();
}

TEST(DialectTest, AStackOfJoinedRowsIsWhereItsPartsLie) {
  const MapRule rule = RuleOf(R"(
to = "l.{layer}.gate_up"
from = ["l.{layer}.{expert}.gate", "l.{layer}.{expert}.up"]
join = "rows"
stack = "expert"
)");
  const auto file = FileShapeOf(rule, {4, 6, 5});
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->shape, (Shape{3, 5}));
  EXPECT_EQ(file->stacked, 4u);
  EXPECT_EQ(DialectShapeOf(rule, *file).value(), (Shape{4, 6, 5}));
  const BoxMap map = MapOfPart(rule, file->shape, {1, 2}, 9);
  EXPECT_EQ(map, (BoxMap{9, {0, 0}, {3, 5}, {2, 3, 0}, {-1, 0, 1}}));
  EXPECT_TRUE(CheckBoxMap(map, file->shape, {4, 6, 5}).has_value());
}

TEST(DialectTest, AJoinOfTurnedPartsIsAlongTheDialectsDimension) {
  const MapRule rule = RuleOf(R"(
to = "gate_up"
from = ["gate", "up"]
join = "dim 1"
transpose = true
)");
  const auto file = FileShapeOf(rule, {5, 6});
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->shape, (Shape{3, 5}));
  EXPECT_EQ(DialectShapeOf(rule, *file).value(), (Shape{5, 6}));
  const BoxMap map = MapOfPart(rule, file->shape, {1, 0}, 0);
  EXPECT_EQ(map, (BoxMap{0, {0, 0}, {3, 5}, {0, 3}, {1, 0}}));
  EXPECT_TRUE(CheckBoxMap(map, file->shape, {5, 6}).has_value());
}

TEST(DialectTest, ShapesThatDoNotDivideAreRefused) {
  const MapRule rule = RuleOf("to = \"a\"\nfrom = [\"b\", \"c\"]\njoin = \"rows\"\n");
  EXPECT_FALSE(FileShapeOf(rule, {5, 2}).has_value());
  EXPECT_FALSE(FileShapeOf(rule, {}).has_value());
  EXPECT_FALSE(DialectShapeOf(rule, {{uint64_t{1} << 63, 2}, 1}).has_value());
  const MapRule stack = RuleOf("to = \"a\"\nfrom = [\"{expert}.b\"]\nstack = \"expert\"\n");
  EXPECT_FALSE(FileShapeOf(stack, {}).has_value());
}

TEST(DialectTest, RulesAndTypesWithTheSameNamesAreKnown) {
  const auto table = DialectTable::Parse(R"(
name = "hf5"
[[map]]
model_types = ["m"]
to = "lm_head.weight"
from = ["embed_out.weight"]
[[same]]
model_types = ["llama"]
)",
                                         "hf5.toml");
  ASSERT_TRUE(table.has_value()) << table.error().message;
  EXPECT_TRUE(table->RulesOf("m").front()->IsWhole());
  EXPECT_TRUE(table->Knows("llama"));
  EXPECT_TRUE(table->RulesOf("llama").empty());
  EXPECT_FALSE(table->Knows("other"));
}

TEST(DialectTest, WhatCannotBeInvertedIsRefusedByNameAndLine) {
  const auto says = [](std::string_view rule, ErrorCode code, std::string_view text) {
    const auto table = Table(rule);
    ASSERT_FALSE(table.has_value()) << rule;
    EXPECT_EQ(table.error().code, code) << table.error().message;
    EXPECT_NE(table.error().message.find(text), std::string::npos) << table.error().message;
    EXPECT_TRUE(table.error().message.starts_with("hf5.toml:")) << table.error().message;
  };
  constexpr auto kNo = ErrorCode::kUnsupported;
  constexpr auto kBad = ErrorCode::kInvalid;
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"plus one\"\n", kNo, "'plus one' cannot be inverted");
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"groups\"\n", kNo, "'groups' needs sizes");
  says("to = \"a.*\"\nfrom = [\"b\"]\n", kNo, "'a.*' cannot be inverted");
  says("to = \"a.{rest}\"\nfrom = [\"b.{rest}\"]\n", kNo, "cannot be inverted");
  says("to = \"a\"\nfrom = [\"b.{layer}\"]\n", kBad, "do not say the same of {layer}");
  says("to = \"a.{expert}\"\nfrom = [\"b.{expert}\"]\nstack = \"expert\"\n", kBad, "the same of");
  says("to = \"a\"\nfrom = [\"b\", \"c\"]\n", kBad, "need a 'join'");
  says("to = \"a\"\nfrom = [\"b\"]\nstack = \"rank\"\n", kBad, "'stack' is expert or layer");
  says("to = \"a\"\nfrom = [\"b\"]\nadd = 1\n", kBad, "'add' is not a key");
  says("to = \"a\"\nfrom = []\n", kBad, "must be a list");
  says("from = [\"b\"]\n", kBad, "1 to 512 bytes");
  EXPECT_FALSE(DialectTable::Parse("name = \"a\"\n[[[", "hf5.toml").has_value());
}

}  // namespace
}  // namespace ckptfs
