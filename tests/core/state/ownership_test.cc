// SPDX-License-Identifier: Apache-2.0
#include "core/state/ownership.h"

#include <gmock/gmock.h>

namespace ckptfs {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using Owners = std::vector<std::vector<std::string>>;

// A member with Adam's moments of a shape.
OptimizerMember Of(Shape shape, std::string name = "") {
  return {std::move(name), {{"step", {}}, {"exp_avg", shape}, {"exp_avg_sq", shape}}, {}};
}
OptimizerMember Blank() { return {}; }
// A count alone; factored moments; a preconditioner.
OptimizerMember Counted() { return {"", {{"step", {}}}, {}}; }
OptimizerMember Factored(const Shape& row, const Shape& column) {
  return {"", {{"exp_avg_sq_row", row}, {"exp_avg_sq_col", column}}, {}};
}
OptimizerMember Odd(const Shape& shape) { return {"", {{"precond", shape}}, {}}; }

const std::vector<OwnableParameter> kTwoLayers = {
    {"body.weight", {8, 8}}, {"body.bias", {8}}, {"head.weight", {8, 8}}, {"head.bias", {8}}};
const std::vector<OwnableParameter> kOwnShapes = {
    {"a.weight", {2, 3}}, {"a.bias", {2}}, {"b.weight", {4, 2}}, {"b.bias", {4}}};

struct Case {
  std::string about;
  std::vector<OwnableParameter> parameters;
  std::vector<std::vector<OptimizerMember>> groups;
  Owners owners = {};  // "" of nobody
  Evidence evidence = Evidence::kNone;
  std::string why = {};  // a part of it
  std::vector<std::string> order = {};
  std::optional<ToolRule> rule = {};
  // Prints of the masters of members, and of the weights of parameters.
  std::optional<MasterPrints> masters = {};
};

StateOwners Decide(const Case& one) {
  OwnershipQuestion question{one.parameters, one.groups, {}, one.order, one.rule, {}};
  if (one.masters) question.masters = [&] { return Result<MasterPrints>(*one.masters); };
  return DecideOwners(question).value();
}

void Check(const Case& one) {
  SCOPED_TRACE(one.about);
  const StateOwners decided = Decide(one);
  if (one.why.empty()) {
    EXPECT_EQ(decided.why, "");
  } else {
    EXPECT_THAT(decided.why, HasSubstr(one.why));
    EXPECT_THAT(decided.remedy, HasSubstr("--parameter-order"));
  }
  ASSERT_EQ(decided.groups.size(), one.groups.size());
  for (size_t g = 0; g < decided.groups.size(); ++g) {
    ASSERT_EQ(decided.groups[g].size(), one.groups[g].size());
    for (size_t i = 0; i < decided.groups[g].size(); ++i) {
      const Owner& owner = decided.groups[g][i];
      const std::string wanted = one.owners.empty() ? "" : one.owners[g][i];
      EXPECT_EQ(owner.parameter ? one.parameters[*owner.parameter].name : "", wanted)
          << g << " " << i;
      EXPECT_EQ(owner.evidence, wanted.empty() ? Evidence::kNone : one.evidence) << g << " " << i;
    }
  }
}

TEST(OwnershipTest, ShapesProveWhereTheyLeaveOneWay) {
  const std::vector<Case> cases = {
      {"any order",
       kOwnShapes,
       {{Of({4, 2}), Of({2, 3})}, {Of({4}), Of({2})}},
       {{"b.weight", "a.weight"}, {"b.bias", "a.bias"}},
       Evidence::kShape},
      {"frozen ones of other shapes",
       kOwnShapes,
       {{Of({4}), Of({2, 3})}},
       {{"b.bias", "a.weight"}},
       Evidence::kShape},
      {"two of one shape",
       kTwoLayers,
       {{Of({8, 8}), Of({8}), Of({8, 8}), Of({8})}},
       {},
       Evidence::kNone,
       "'body.bias' and which to 'head.bias', both of shape [8]"},
      {"one of them trained",
       {{"q", {2, 2}}, {"o", {2, 2}}, {"n", {2}}},
       {{Of({2, 2}), Of({2})}},
       {},
       Evidence::kNone,
       "'q' and which to 'o'"},
      {"two of one shape in groups of their own",
       {{"q", {2, 2}}, {"o", {2, 2}}},
       {{Of({2, 2})}, {Of({2, 2})}},
       {},
       Evidence::kNone,
       "'q' and which to 'o'"},
      {"of no parameter", kOwnShapes, {{Of({2, 3}), Of({7})}}, {}, Evidence::kNone, "shape [7]"},
      {"more than one for a parameter",
       kOwnShapes,
       {{Of({2}), Of({2})}},
       {},
       Evidence::kNone,
       "shape [2]"},
      {"more members than parameters",
       {{"a", {2}}},
       {{Of({2}), Blank()}},
       {},
       Evidence::kNone,
       "more members than the model has parameters (2 and 1)"},
      {"rows and columns tell a shape",
       kOwnShapes,
       {{Of({2}), Factored({4}, {2}), Of({4}), Factored({2}, {3})}},
       {{"a.bias", "b.weight", "b.bias", "a.weight"}},
       Evidence::kShape},
      {"a preconditioner tells none",
       kOwnShapes,
       {{Odd({2, 2}), Odd({2, 3}), Of({4, 2}), Of({4})}},
       {},
       Evidence::kNone,
       "no state that tells"},
      {"a number tells none",
       {{"a", {2}}, {"b", {3}}},
       {{Counted(), Counted()}},
       {},
       Evidence::kNone,
       "no state that tells"},
      {"nothing at all", {}, {}, {}, Evidence::kShape},
  };
  for (const Case& one : cases) Check(one);
}

// One optimizer of a model and of a criterion, whose weight has the shape of a frozen layer.
TEST(OwnershipTest, AShapeOfAnotherModuleProvesNothing) {
  const std::vector<OwnableParameter> criterion = {{"weight", {4, 2}}};
  const std::vector<std::vector<OptimizerMember>> groups = {{Of({2, 3}), Of({2}), Of({4, 2})}};
  OwnershipQuestion question{kOwnShapes, groups, {}, {}, {}, {}};
  EXPECT_EQ(DecideOwners(question).value().why, "");
  question.elsewhere = criterion;
  EXPECT_THAT(DecideOwners(question).value().why,
              HasSubstr("belong to 'b.weight' or to 'weight' of another module"));
}

TEST(OwnershipTest, MembersThatNeverHadAGradient) {
  const std::vector<OwnableParameter> three = {{"a", {2}}, {"b", {3}}, {"c", {3}}};
  const std::vector<Case> cases = {
      {"the one that is left",
       kOwnShapes,
       {{Of({2, 3}), Blank(), Of({4}), Of({4, 2})}},
       {{"a.weight", "a.bias", "b.bias", "b.weight"}},
       Evidence::kShape},
      {"alike in one group: it does not matter which is which",
       three,
       {{Blank(), Of({2}), Blank()}},
       {{"b", "a", "c"}},
       Evidence::kShape},
      {"in two groups it does",
       three,
       {{Blank(), Of({2})}, {Blank()}},
       {},
       Evidence::kNone,
       "no state that tells"},
      {"which of them are frozen, nothing says",
       three,
       {{Of({2}), Blank()}},
       {},
       Evidence::kNone,
       "no state that tells"},
      {"an optimizer without states",
       three,
       {{Blank(), Blank(), Blank()}},
       {{"a", "b", "c"}},
       Evidence::kShape},
      {"a moment without dimensions is not that of a row",
       {{"a", {2}}, {"b", {3}}},
       {{Of({2}), {"", {{"exp_avg", {}}}, {}}}},
       {},
       Evidence::kNone,
       "does not fit 'b'"},
  };
  for (const Case& one : cases) Check(one);
}

TEST(OwnershipTest, NamesAreBelievedAndEachAloneIsLeftOut) {
  const std::vector<Case> cases = {
      {"the optimizer's order",
       kTwoLayers,
       {{Of({8, 8}, "head.weight"), Of({8}, "head.bias")}, {Of({8, 8}, "body.weight")}},
       {{"head.weight", "head.bias"}, {"body.weight"}},
       Evidence::kName},
      {"a name that the model does not have",
       kTwoLayers,
       {{Of({8, 8}, "head.weight"), Of({8}, "gone")}},
       {{"head.weight", ""}},
       Evidence::kName},
      {"a name twice is nobody's",
       kTwoLayers,
       {{Of({8, 8}, "head.weight"), Of({8, 8}, "head.weight"), Of({8}, "head.bias")}},
       {{"", "", "head.bias"}},
       Evidence::kName},
      {"wrapped in a module",
       kTwoLayers,
       {{Of({8, 8}, "module.head.weight"), Of({8}, "module.head.bias")}},
       {{"head.weight", "head.bias"}},
       Evidence::kName},
      {"wrapped, but of another shape",
       kTwoLayers,
       {{Of({8, 8}, "module.head.weight"), Of({4}, "module.head.bias")}},
       {{"head.weight", ""}},
       Evidence::kName},
      // A projection of a moment: its state is left out by its shape, not the name.
      {"a shape that is not the parameter's",
       kTwoLayers,
       {{Of({4, 8}, "head.weight")}},
       {{"head.weight"}},
       Evidence::kName},
  };
  for (const Case& one : cases) Check(one);
  const StateOwners decided = Decide(cases[1]);
  EXPECT_THAT(decided.groups[0][1].why, HasSubstr("'gone' is not a parameter of the model"));
  EXPECT_THAT(Decide(cases[2]).groups[0][0].why, HasSubstr("named twice"));
}

TEST(OwnershipTest, ASecondNameIsThatOfItsParameter) {
  const std::vector<OwnableParameter> parameters = {{"embed.weight", {8, 8}},
                                                    {"out.weight", {8, 8}}};
  const std::vector<std::vector<OptimizerMember>> groups = {
      {Of({8, 8}, "head.weight"), Of({8, 8}, "out.weight")}};
  OwnershipQuestion question{parameters, groups, {{"head.weight", "embed.weight"}}, {}, {}, {}};
  const StateOwners decided = DecideOwners(question).value();
  EXPECT_EQ(decided.groups[0][0].parameter, 0u);
  EXPECT_EQ(decided.groups[0][1].parameter, 1u);
}

TEST(OwnershipTest, TheUsersOrderIsTheOptimizersAndIsChecked) {
  const std::vector<std::vector<OptimizerMember>> one = {
      {Of({8, 8}), Of({8}), Of({8, 8}), Of({8})}};
  const std::vector<std::vector<OptimizerMember>> two = {{Of({8, 8}), Of({8, 8})},
                                                         {Of({8}), Of({8})}};
  const std::vector<Case> cases = {
      {"head first",
       kTwoLayers,
       one,
       {{"head.weight", "head.bias", "body.weight", "body.bias"}},
       Evidence::kOrder,
       "",
       {"head.weight", "head.bias", "body.weight", "body.bias"}},
      {"group by group",
       kTwoLayers,
       two,
       {{"head.weight", "body.weight"}, {"head.bias", "body.bias"}},
       Evidence::kOrder,
       "",
       {"head.weight", "body.weight", "head.bias", "body.bias"}},
      {"the model's order is not that of two groups",
       kTwoLayers,
       two,
       {},
       Evidence::kNone,
       "its member 1 has states of shape [8, 8], but 'body.bias' is of shape [8]",
       {"body.weight", "body.bias", "head.weight", "head.bias"}},
      {"too few",
       kTwoLayers,
       one,
       {},
       Evidence::kNone,
       "names 1 parameter, but the optimizer has 4",
       {"head.weight"}},
      {"not the model's",
       kTwoLayers,
       one,
       {},
       Evidence::kNone,
       "'x' is not a parameter",
       {"head.weight", "head.bias", "body.weight", "x"}},
      {"one twice",
       kTwoLayers,
       one,
       {},
       Evidence::kNone,
       "names 'head.weight' twice",
       {"head.weight", "head.bias", "head.weight", "body.bias"}},
      {"of members that tell nothing",
       kTwoLayers,
       {{Odd({3}), Counted()}},
       {{"head.weight", "head.bias"}},
       Evidence::kOrder,
       "",
       {"head.weight", "head.bias"}},
  };
  for (const Case& one_case : cases) Check(one_case);
}

// Bits of a rule of two groups.
constexpr uint64_t kFirst = 1, kSecond = 2;

TEST(OwnershipTest, AToolsRuleProvesWhereItFitsInOneWay) {
  const std::vector<OwnableParameter> model = {{"embed.weight", {9, 8}}, {"body.weight", {8, 8}},
                                               {"body.bias", {8}},       {"again.weight", {8, 8}},
                                               {"again.bias", {8}},      {"norm.weight", {4}}};
  const ToolRule decay{"the tool", {kFirst, kFirst, kSecond, kFirst, kSecond, kFirst | kSecond}};
  const std::vector<std::vector<OptimizerMember>> told = {{Of({9, 8}), Of({8, 8}), Of({8, 8})},
                                                          {Of({8}), Of({8}), Of({4})}};
  const std::vector<OwnableParameter> layers = {{"embed.weight", {9, 8}},
                                                {"layers.0.weight", {8, 8}},
                                                {"layers.1.weight", {8, 8}},
                                                {"norm.weight", {8}}};
  const ToolRule of_layers{"the tool", {kFirst, kFirst, kFirst, kFirst | kSecond}};
  const std::vector<Case> cases = {
      {"layers of one shape, and a norm that is told by the numbers",
       layers,
       {{Of({9, 8}), Of({8, 8}), Of({8, 8})}, {Of({8})}},
       {{"embed.weight", "layers.0.weight", "layers.1.weight"}, {"norm.weight"}},
       Evidence::kRule,
       "",
       {},
       of_layers},
      {"the norm with those that decay",
       layers,
       {{Of({9, 8}), Of({8, 8}), Of({8, 8}), Of({8})}, {}},
       {{"embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight"}, {}},
       Evidence::kRule,
       "",
       {},
       of_layers},
      {"two modules that a script may have given in another order",
       model,
       told,
       {},
       Evidence::kNone,
       "they also fit an order in which 'again.weight' stands where it has 'body.weight'",
       {},
       decay},
      {"all reversed",
       kTwoLayers,
       {{Of({8, 8}), Of({8, 8})}, {Of({8}), Of({8})}},
       {},
       Evidence::kNone,
       "they also fit an order in which 'head.weight' stands",
       {},
       ToolRule{"the tool", {kFirst, kSecond, kFirst, kSecond}}},
      {"behind each other: it could be either",
       {{"a", {8, 8}}, {"x", {8}}, {"y", {8}}},
       {{Of({8, 8}), Of({8})}, {Of({8})}},
       {},
       Evidence::kNone,
       "several ways",
       {},
       ToolRule{"the tool", {kFirst, kFirst | kSecond, kFirst | kSecond}}},
      {"a frozen one among equals",
       kTwoLayers,
       {{Of({8, 8})}, {Of({8}), Of({8})}},
       {},
       Evidence::kNone,
       "several ways",
       {},
       ToolRule{"the tool", {kFirst, kSecond, kFirst, kSecond}}},
      {"groups of a script's own",
       kTwoLayers,
       {{Of({8, 8}), Of({8})}, {Of({8, 8}), Of({8})}},
       {},
       Evidence::kNone,
       "do not fit that order",
       {},
       ToolRule{"the tool", {kFirst, kSecond, kFirst, kSecond}}},
      {"another order within a group, of which shapes tell",
       kOwnShapes,
       {{Of({4, 2}), Of({2, 3})}, {Of({2}), Of({4})}},
       {{"b.weight", "a.weight"}, {"a.bias", "b.bias"}},
       Evidence::kShape,
       "",
       {},
       ToolRule{"the tool", {kFirst, kSecond, kFirst, kSecond}}},
  };
  for (const Case& one : cases) Check(one);
}

TEST(OwnershipTest, MastersProveWhoseTheyAre) {
  const std::vector<std::vector<OptimizerMember>> groups = {
      {Of({8, 8}), Of({8}), Of({8, 8}), Of({8})}};
  const std::vector<std::optional<std::string>> own = {"bw", "bb", "hw", "hb"};
  const std::vector<Case> cases = {
      {"head first",
       kTwoLayers,
       groups,
       {{"head.weight", "head.bias", "body.weight", "body.bias"}},
       Evidence::kMaster,
       "",
       {},
       {},
       MasterPrints{{{"hw", "hb", "bw", "bb"}}, own}},
      {"two that are equal",
       kTwoLayers,
       groups,
       {},
       Evidence::kNone,
       "equal masters",
       {},
       {},
       MasterPrints{{{"hw", "0", "bw", "0"}}, {"bw", "0", "hw", "0"}}},
      {"a master of no weight",
       kTwoLayers,
       groups,
       {},
       Evidence::kNone,
       "whose master is the weight",
       {},
       {},
       MasterPrints{{{"hw", "hb", "xx", "bb"}}, own}},
      {"nothing told, nothing proved",
       kTwoLayers,
       groups,
       {},
       Evidence::kNone,
       "'body.bias' and which to 'head.bias'",
       {},
       {},
       MasterPrints{{{"hw", {}, "bw", {}}}, {"bw", {}, {}, "hb"}}},
      {"the user's order is checked, too",
       kTwoLayers,
       groups,
       {},
       Evidence::kNone,
       "member 0 has another master",
       {"body.weight", "body.bias", "head.weight", "head.bias"},
       {},
       MasterPrints{{{"hw", "hb", "bw", "bb"}}, own}},
  };
  for (const Case& one : cases) Check(one);
}

}  // namespace
}  // namespace ckptfs
