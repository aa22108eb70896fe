// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/dialect.h"

#include <gtest/gtest.h>

#include <map>

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
  const RuleSizes sizes = SizesOfRule(rule, {}).value();
  const auto file = FileShapesOf(rule, sizes, {4, 6, 5});
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->parts, (std::vector<Shape>{{3, 5}, {3, 5}}));
  EXPECT_EQ(file->stacked, 4u);
  EXPECT_EQ(DialectShapeOf(rule, sizes, *file).value(), (Shape{4, 6, 5}));
  const auto maps = MapsOfPart(rule, sizes, file->parts[1], {1, 2}, 9);
  EXPECT_EQ(maps, (std::vector<BoxMap>{{9, {0, 0}, {3, 5}, {2, 3, 0}, {-1, 0, 1}}}));
  EXPECT_TRUE(CheckBoxMap(maps[0], file->parts[1], {4, 6, 5}).has_value());
  EXPECT_EQ(MapsToPart(rule, sizes, file->parts[1], {1, 2}, 9)[0], Inverse(maps[0], 9));
}

TEST(DialectTest, AJoinOfTurnedPartsIsAlongTheDialectsDimension) {
  const MapRule rule = RuleOf(R"(
to = "gate_up"
from = ["gate", "up"]
join = "dim 1"
transpose = true
)");
  const RuleSizes sizes = SizesOfRule(rule, {}).value();
  const auto file = FileShapesOf(rule, sizes, {5, 6});
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->parts, (std::vector<Shape>{{3, 5}, {3, 5}}));
  EXPECT_EQ(DialectShapeOf(rule, sizes, *file).value(), (Shape{5, 6}));
  const auto maps = MapsOfPart(rule, sizes, file->parts[1], {1, 0}, 0);
  EXPECT_EQ(maps, (std::vector<BoxMap>{{0, {0, 0}, {3, 5}, {0, 3}, {1, 0}}}));
  EXPECT_TRUE(CheckBoxMap(maps[0], file->parts[1], {5, 6}).has_value());
}

TEST(DialectTest, ShapesThatDoNotDivideAreRefused) {
  const MapRule rule = RuleOf("to = \"a\"\nfrom = [\"b\", \"c\"]\njoin = \"rows\"\n");
  const RuleSizes sizes = SizesOfRule(rule, {}).value();
  EXPECT_FALSE(FileShapesOf(rule, sizes, {5, 2}).has_value());
  EXPECT_FALSE(FileShapesOf(rule, sizes, {}).has_value());
  const Shape large = {uint64_t{1} << 63, 2};
  EXPECT_FALSE(DialectShapeOf(rule, sizes, {{large, large}, 1}).has_value());
  EXPECT_FALSE(DialectShapeOf(rule, sizes, {{{2, 2}, {3, 2}}, 1}).has_value());
  EXPECT_FALSE(DialectShapeOf(rule, sizes, {{{2, 2}, {2, 3}}, 1}).has_value());
  const MapRule stack = RuleOf("to = \"a\"\nfrom = [\"{expert}.b\"]\nstack = \"expert\"\n");
  EXPECT_FALSE(FileShapesOf(stack, SizesOfRule(stack, {}).value(), {}).has_value());
}

// ---- joins that need sizes, element by element -------------------------------------------

using Position = std::vector<uint64_t>;
using Elements = std::map<Position, uint64_t>;  // an integer of its own in each

template <class Visit>
void VisitIndexes(const Shape& shape, const Visit& visit) {
  const auto count = ElementCount(shape).value();
  for (uint64_t i = 0; i < count; ++i) {
    Position index(shape.size());
    uint64_t rest = i;
    for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) index[d] = rest % shape[d];
    visit(index);
  }
}

Elements Numbered(const Shape& shape, uint64_t first) {
  Elements out;
  VisitIndexes(shape, [&](const Position& at) { out.emplace(at, first++); });
  return out;
}

void Apply(const BoxMap& map, const Elements& from, Elements& to) {
  VisitIndexes(map.from_extent, [&](const Position& at) {
    Position source = at, target = map.to_begin;
    for (size_t d = 0; d < at.size(); ++d) source[d] = map.from_begin[d] + at[d] * map.StepOf(d);
    for (size_t d = 0; d < target.size(); ++d) {
      if (map.axis[d] >= 0) target[d] += at[static_cast<size_t>(map.axis[d])];
    }
    EXPECT_TRUE(to.emplace(target, from.at(source)).second);
  });
}

// Joins files' tensors of these shapes by the rule, and expects that the way back gives them.
Elements Joined(const MapRule& rule, const FamilyVariables& known, const std::vector<Shape>& parts,
                Shape* shape = nullptr) {
  const RuleSizes sizes = SizesOfRule(rule, known).value();
  const auto to = DialectShapeOf(rule, sizes, {parts, 1});
  EXPECT_TRUE(to.has_value()) << to.error().message;
  if (!to) return {};
  EXPECT_EQ(FileShapesOf(rule, sizes, *to).value().parts, parts);
  Elements out;
  for (uint32_t p = 0; p < parts.size(); ++p) {
    for (const BoxMap& map : MapsOfPart(rule, sizes, parts[p], {p, 0}, 0)) {
      EXPECT_TRUE(CheckBoxMap(map, parts[p], *to).has_value());
      Apply(map, Numbered(parts[p], 1000 * p), out);
    }
  }
  EXPECT_EQ(out.size(), ElementCount(*to).value());
  for (uint32_t p = 0; p < parts.size(); ++p) {
    Elements back;
    for (const BoxMap& map : MapsToPart(rule, sizes, parts[p], {p, 0}, 0)) {
      EXPECT_TRUE(CheckBoxMap(map, *to, parts[p]).has_value());
      Apply(map, out, back);
    }
    EXPECT_EQ(back, Numbered(parts[p], 1000 * p));
  }
  if (shape != nullptr) *shape = *to;
  return out;
}

constexpr const char* kGroupedQkv = R"(
to = "qkv"
from = ["q", "k", "v"]
join = "groups"
groups = "kv_heads"
shares = ["heads / kv_heads", "1", "1"]
unit = "head_dim"
)";

TEST(DialectTest, GroupsAreEachGroupsQueriesThenItsKeyAndValue) {
  const MapRule rule = RuleOf(kGroupedQkv);
  constexpr uint64_t kHeads = 6, kGroups = 3, kDim = 4, kHidden = 2;
  const FamilyVariables known = {{"heads", kHeads}, {"kv_heads", kGroups}, {"head_dim", kDim}};
  Shape shape;
  const Elements made = Joined(
      rule, known, {{kHeads * kDim, kHidden}, {kGroups * kDim, kHidden}, {kGroups * kDim, kHidden}},
      &shape);
  ASSERT_EQ(shape, (Shape{(kHeads + 2 * kGroups) * kDim, kHidden}));
  // torch.cat([q.view(groups, -1, hidden), k.view(...), v.view(...)], 1).view(-1, hidden)
  uint64_t row = 0;
  for (uint64_t g = 0; g < kGroups; ++g) {
    for (const auto& [part, heads] : {std::pair(0, kHeads / kGroups), {1, 1}, {2, 1}}) {
      for (uint64_t r = 0; r < heads * kDim; ++r, ++row) {
        const uint64_t first =
            1000 * static_cast<uint64_t>(part) + (g * heads * kDim + r) * kHidden;
        EXPECT_EQ(made.at({row, 1}), first + 1) << row;
      }
    }
  }
  Joined(rule, known, {{kHeads * kDim}, {kGroups * kDim}, {kGroups * kDim}});  // biases
}

TEST(DialectTest, ChunksAreOfUnequalSharesAndHeadsOfEqualOnes) {
  const MapRule chunks = RuleOf(R"(
to = "qkv"
from = ["q", "k", "v"]
join = "chunks"
shares = ["heads", "kv_heads", "kv_heads"]
)");
  const Elements rows = Joined(chunks, {{"heads", 4}, {"kv_heads", 2}}, {{8, 3}, {4, 3}, {4, 3}});
  EXPECT_EQ(rows.at({7, 2}), 23u);
  EXPECT_EQ(rows.at({8, 0}), 1000u);
  EXPECT_EQ(rows.at({12, 0}), 2000u);
  const MapRule heads = RuleOf(R"(
to = "qkv"
from = ["q", "k", "v"]
join = "heads"
groups = "heads"
)");
  const Elements each = Joined(heads, {{"heads", 2}}, {{4, 1}, {4, 1}, {4, 1}});
  const uint64_t wanted[] = {0, 1, 1000, 1001, 2000, 2001, 2, 3, 1002, 1003, 2002, 2003};
  for (uint64_t row = 0; row < 12; ++row) EXPECT_EQ(each.at({row, 0}), wanted[row]) << row;
}

TEST(DialectTest, TwoHalvesOfAHeadInterleave) {
  const MapRule rule = RuleOf(R"(
to = "wq"
from = ["q"]
join = "interleave2"
groups = "heads"
)");
  // q.view(heads, 2, dim // 2, hidden).transpose(1, 2).reshape(heads * dim, hidden)
  const Elements made = Joined(rule, {{"heads", 2}}, {{12, 1}});
  const uint64_t wanted[] = {0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11};
  for (uint64_t row = 0; row < 12; ++row) EXPECT_EQ(made.at({row, 0}), wanted[row]) << row;
  const RuleSizes sizes = SizesOfRule(rule, {{"heads", 2}}).value();
  EXPECT_EQ(MapsToPart(rule, sizes, {12, 5}, {}, 0).size(), 4u);  // two a head
  EXPECT_EQ(MapsOfPart(rule, sizes, {12, 5}, {}, 0).size(), 6u);  // half a head's rows
  EXPECT_FALSE(FileShapesOf(rule, sizes, {6, 5}).has_value());    // a head of three rows
}

TEST(DialectTest, JoinsOfTurnedAndStackedPartsAreAlongTheirDimension) {
  const MapRule turned = RuleOf(R"(
to = "qkv"
from = ["q", "k"]
join = "groups"
groups = "kv_heads"
shares = ["2", "1"]
transpose = true
)");
  const Elements made = Joined(turned, {{"kv_heads", 2}}, {{5, 8}, {5, 4}});
  EXPECT_EQ(made.at({4, 3}), 1012u);  // k[3][0]: row 4 of group 0 is the first of k
  const MapRule stack = RuleOf(R"(
to = "{layer}.qkv"
from = ["{layer}.{expert}.q", "{layer}.{expert}.k"]
join = "chunks"
shares = ["2", "1"]
stack = "expert"
)");
  const RuleSizes sizes = SizesOfRule(stack, {}).value();
  const auto file = FileShapesOf(stack, sizes, {3, 6, 5});
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(file->parts, (std::vector<Shape>{{4, 5}, {2, 5}}));
  EXPECT_EQ(MapsOfPart(stack, sizes, {2, 5}, {1, 2}, 0),
            (std::vector<BoxMap>{{0, {0, 0}, {2, 5}, {2, 4, 0}, {-1, 0, 1}}}));
}

TEST(DialectTest, SizesThatNobodyTellsOrThatDoNotFitAreRefused) {
  const MapRule rule = RuleOf(kGroupedQkv);
  const auto missing = SizesOfRule(rule, {{"heads", 4}});
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(missing.error().message.find("'kv_heads'"), std::string::npos);
  EXPECT_FALSE(SizesOfRule(rule, {{"heads", 4}, {"kv_heads", 3}}).has_value());
  EXPECT_FALSE(SizesOfRule(rule, {{"heads", 4}, {"kv_heads", 0}}).has_value());
  EXPECT_FALSE(SizesOfRule(rule, {{"heads", 4}, {"kv_heads", -2}}).has_value());
  EXPECT_FALSE(SizesOfRule(rule, {{"heads", INT64_MAX}, {"kv_heads", 1}}).has_value());
  // Twice as many heads of half the size would divide as well.
  const RuleSizes sizes =
      SizesOfRule(rule, {{"heads", 8}, {"kv_heads", 4}, {"head_dim", 8}}).value();
  EXPECT_FALSE(FileShapesOf(rule, sizes, {64, 2}).has_value());
  EXPECT_FALSE(DialectShapeOf(rule, sizes, {{{32, 2}, {16, 2}, {16, 2}}, 1}).has_value());
  EXPECT_FALSE(DialectShapeOf(rule, sizes, {{{64, 2}, {32, 2}, {64, 2}}, 1}).has_value());
  // A tensor without elements does not become as many boxes as it has heads.
  EXPECT_EQ(MapsOfPart(rule, sizes, {64, 0}, {}, 0).size(), 1u);
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
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"groups\"\n", kBad, "needs 'groups'");
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"groups\"\ngroups = \"g\"\n", kBad, "needs 'shares'");
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"chunks\"\nshares = [\"1\", \"2\"]\n", kBad,
       "one number for each 'from'");
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"heads\"\ngroups = \"+\"\n", kBad, "'+'");
  says("to = \"a\"\nfrom = [\"b\", \"c\"]\njoin = \"interleave2\"\ngroups = \"g\"\n", kBad,
       "of one tensor");
  says("to = \"a\"\nfrom = [\"b\"]\njoin = \"rows\"\nunit = \"g\"\n", kBad,
       "does not have a 'unit'");
  says("to = \"a\"\nfrom = [\"b\"]\ngroups = \"g\"\n", kBad, "does not have 'groups'");
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
