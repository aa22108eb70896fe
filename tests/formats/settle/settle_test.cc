// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/settle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "formats/settle/member_owners.h"
#include "formats/sharding/sharding_info.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kBlobBytes = 1 << 20;

class SettleTest : public testing::Test {
 protected:
  SettleTest() {
    Blob blob;
    blob.path = "file";
    blob.stamp.size = kBlobBytes;
    blob_ = assembler_.AddBlob(std::move(blob));
    options_.families = &families_;
    dict_.optimizers.push_back({.label = "", .what = "the optimizer", .shown = " (elsewhere)"});
  }

  PlaceParts At(uint64_t offset, const Shape& shape) const {
    return [=, this](Assembler& assembler, AtomIndex atom) -> Status {
      const uint32_t local = assembler.AddLocal(atom, 0, WholeTensor(shape));
      const uint64_t elements = ElementCount(shape).value();
      assembler.AddFragment(atom, 0, local, {0, elements, blob_, offset, DType::kF32});
      return {};
    };
  }

  StateDict::Tensor& Weight(const std::string& name, const Shape& shape) {
    dict_.tensors.push_back({name, DType::kF32, shape, At(next_ += 1024, shape)});
    return dict_.tensors.back();
  }

  void State(StateDict::Owner owner, const std::string& kind, const Shape& shape) {
    StateDict::State state{0, std::move(owner), kind};
    state.shape = shape;
    state.place = At(next_ += 1024, shape);
    dict_.states.push_back(std::move(state));
  }

  void Number(StateDict::Owner owner, const std::string& kind, float value) {
    StateDict::State state{0, std::move(owner), kind};
    state.scalar = [value] {
      return std::optional(ScalarValue{
          DType::kF32, {}, std::string(reinterpret_cast<const char*>(&value), 4), false});
    };
    dict_.states.push_back(std::move(state));
  }

  void Groups(std::vector<std::vector<int64_t>> groups) {
    for (const auto& numbers : groups) {
      StateDict::Group group{0, "pickle", {}};
      for (const int64_t number : numbers) group.members.push_back({"", number});
      dict_.groups.push_back(std::move(group));
    }
  }

  // The part of one tensor-parallel rank.
  PlaceParts On(uint32_t tp) {
    next_ += 1024;
    return [offset = next_, tp, this](Assembler&, AtomParts& parts) -> Status {
      CKPT_ASSIGN_OR_RETURN(const auto local, parts.Add(Holder{0, tp}));
      const uint64_t elements = ElementCount(parts.LocalOf(tp).shape).value();
      parts.AddFragment(local, {0, elements, blob_, offset, DType::kF32});
      return {};
    };
  }

  // One rank's state of its part.
  void StateOn(uint32_t tp, const std::string& kind, const Shape& shape) {
    StateDict::State state{tp, "a", kind};
    state.shape = shape;
    state.rank = tp;
    state.place = On(tp);
    dict_.states.push_back(std::move(state));
  }

  // A tensor that two ranks have rows of, each with an optimizer of its own.
  StateDict::Tensor& CutWeight() {
    info_.lists = true;  // what no list names is cut along dim 0
    dict_.cuts = &info_;
    dict_.optimizers.resize(2);
    assembler_.header().layout.tp = 2;
    StateDict::Tensor& added = Weight("a", {2, 3});
    added.ranks = {{2, 3}, {1, 3}};
    added.place = [first = On(0), second = On(1)](Assembler& assembler, AtomParts& parts) {
      const Status placed = first(assembler, parts);
      return placed ? second(assembler, parts) : placed;
    };
    return added;
  }

  StepModel Step() {
    auto settled = Settle(dict_, options_, assembler_);
    EXPECT_TRUE(settled) << settled.error().message;
    if (settled) settled_ = *std::move(settled);
    auto step = std::move(assembler_).Finish();
    EXPECT_TRUE(step) << step.error().message;
    return *std::move(step);
  }

  // The kinds of a parameter's atoms, in their order.
  static std::vector<std::string> KindsOf(const StepModel& step, std::string_view name) {
    std::vector<std::string> kinds;
    for (const Atom& atom : step.atoms) {
      if (step.parameter(atom.parameter).name == name) kinds.push_back(atom.kind);
    }
    return kinds;
  }

  static Role RoleOf(const StepModel& step, std::string_view name) {
    return step.parameter(*step.FindParameter(name)).role;
  }

  FamilySet families_;
  SourceOptions options_;
  Assembler assembler_;
  BlobIndex blob_{};
  uint64_t next_ = 0;
  ShardingInfo info_;
  StateDict dict_;
  Settled settled_;
};

TEST_F(SettleTest, StatesOfNamesAreTheirParameters) {
  Weight("a", {4});
  Weight("frozen", {4});
  State("a", "exp_avg", {4});
  Number("a", "step", 7);
  dict_.groups.push_back({0, "pickle", {{"a", std::nullopt}}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "exp_avg", "step"));
  EXPECT_EQ(RoleOf(step, "a"), Role::kTrainable);
  EXPECT_EQ(RoleOf(step, "frozen"), Role::kFrozen);
  EXPECT_EQ(settled_.steps, 7u);
  ASSERT_EQ(step.groups.size(), 1u);
  EXPECT_THAT(step.groups[0].parameters, ElementsAre(ParameterIndex{0}));
  EXPECT_EQ(step.model_dtype, DType::kF32);
}

TEST_F(SettleTest, NumbersThatShapesProveAreTaken) {
  Weight("a", {4});
  Weight("b", {2, 2});
  Weight("b.running_mean", {4});  // a buffer: no optimizer trains it
  State(int64_t{0}, "exp_avg", {2, 2});
  State(int64_t{1}, "exp_avg", {4});
  Groups({{0}, {1}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "exp_avg"));
  EXPECT_THAT(KindsOf(step, "b"), ElementsAre("weight", "exp_avg"));
  EXPECT_THAT(step.groups[0].parameters, ElementsAre(ParameterIndex{1}));
  EXPECT_EQ(RoleOf(step, "b.running_mean"), Role::kBuffer);
  EXPECT_THAT(step.left_out, IsEmpty());
}

TEST_F(SettleTest, NumbersThatNothingProvesLeaveTheOptimizerOutAlone) {
  Weight("a", {4});
  Weight("b", {4});
  State(int64_t{0}, "exp_avg", {4});
  State(int64_t{1}, "exp_avg", {4});
  Groups({{0, 1}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight"));
  EXPECT_THAT(step.groups, IsEmpty());
  EXPECT_FALSE(settled_.numbers[0]);
  EXPECT_EQ(RoleOf(step, "b"), Role::kTrainable);  // nobody says that it is not
  ASSERT_EQ(step.left_out.size(), 1u);
  EXPECT_EQ(step.left_out[0].what, "the optimizer");
  EXPECT_THAT(step.left_out[0].why, HasSubstr("'a' and which to 'b'"));
  EXPECT_THAT(step.left_out[0].why, HasSubstr("(elsewhere)"));
}

TEST_F(SettleTest, ANumberStandsForOneMember) {
  Weight("a", {4});
  Weight("b", {2});
  State(int64_t{0}, "exp_avg", {4});
  Groups({{0}, {0}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight"));
  ASSERT_EQ(step.left_out.size(), 1u);
  EXPECT_THAT(step.left_out[0].why, HasSubstr("have one number"));
}

TEST_F(SettleTest, AStateOfANumberThatNoGroupHasIsSaid) {
  Weight("a", {4});
  Weight("b", {2});
  State(int64_t{0}, "exp_avg", {4});
  State(int64_t{5}, "exp_avg", {2});
  Groups({{0}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "exp_avg"));
  ASSERT_EQ(step.left_out.size(), 1u);
  EXPECT_EQ(step.left_out[0].what, "optimizer state 'exp_avg' of parameter 5");
  EXPECT_EQ(RoleOf(step, "b"), Role::kTrainable);  // the state may be its
}

TEST_F(SettleTest, OptimizersThatNumberTheirParametersAreNotProvedOneByOne) {
  dict_.optimizers.push_back({.label = "other", .what = "another", .shown = ""});
  Weight("a", {4});
  State(int64_t{0}, "exp_avg", {4});
  Groups({{0}});
  dict_.groups.push_back({1, "pickle", {{"", 0}}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight"));
  ASSERT_FALSE(step.left_out.empty());
  EXPECT_THAT(step.left_out[0].why, HasSubstr("2 optimizers number their parameters"));
}

TEST_F(SettleTest, AMemberWhoseNameIsNotTheModelsIsLeftOutAlone) {
  Weight("a", {4});
  State(int64_t{0}, "exp_avg", {4});
  State(int64_t{1}, "exp_avg", {9});
  dict_.groups.push_back({0, "pickle", {{"a", 0}, {"gone", 1}}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "exp_avg"));
  ASSERT_EQ(step.left_out.size(), 1u);
  EXPECT_EQ(step.left_out[0].what, "the optimizer's 'gone'");
}

TEST_F(SettleTest, StatesThatDoNotFitAreAskedForByOne) {
  dict_.unfit = StateDict::Unfit::kLeftOut;
  Weight("a", {4, 2});
  State("a", "exp_avg", {3});         // not the parameter's shape
  State("a", "exp_avg_sq_row", {4});  // a row of it
  State("a", "weight", {4, 2});       // a name of ours
  State("a", "exp_avg_sq_row", {4});  // a second time
  std::vector<std::string> asked;
  dict_.keep = [&](const StateDict::State& state, const std::string&, StateDict::Unplaced) {
    asked.push_back(state.kind);
    return StateDict::Fate{.kept = state.kind == "weight"};
  };
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "exp_avg_sq_row"));
  EXPECT_THAT(asked, ElementsAre("exp_avg", "weight", "exp_avg_sq_row"));
  ASSERT_EQ(step.left_out.size(), 3u);
  EXPECT_THAT(step.left_out[0].what, HasSubstr("([3], the parameter [4, 2])"));
  EXPECT_THAT(step.left_out[1].why, HasSubstr("ckptfs uses for something else (dcp/ alone"));
}

TEST_F(SettleTest, WhereADocumentShowsThemUnfitStatesAreOpaque) {
  Weight("a", {4, 2});
  State("a", "projection", {3});
  const StepModel step = Step();
  const auto atom = step.FindAtom(ParameterIndex{0}, "projection");
  ASSERT_TRUE(atom);
  EXPECT_EQ(step.atom(*atom).relation, Relation::kOpaque);
}

TEST_F(SettleTest, WeightsAreTheMastersOfAnOptimizerThatSaysSo) {
  dict_.optimizers[0].on_weights = true;
  Weight("a", {4});
  Weight("b", {2});
  State(int64_t{0}, "exp_avg", {4});
  Groups({{0}});
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "master", "exp_avg"));
  EXPECT_THAT(KindsOf(step, "b"), ElementsAre("weight"));
}

TEST_F(SettleTest, SecondNamesAndRolesOfTheFormatCount) {
  Weight("a", {4});
  Weight("b", {4}).role = Role::kBuffer;
  dict_.second_names.emplace_back("head", "a");
  const StepModel step = Step();
  ASSERT_EQ(step.aliases.size(), 1u);
  EXPECT_EQ(step.aliases[0].name, "head");
  EXPECT_EQ(RoleOf(step, "b"), Role::kBuffer);
}

TEST_F(SettleTest, RanksPartsMakeUpOneTensorAndItsStates) {
  CutWeight();
  StateOn(0, "exp_avg", {2, 3});
  StateOn(1, "exp_avg", {1, 3});
  const StepModel step = Step();
  EXPECT_EQ(step.parameters[0].shape, (Shape{3, 3}));
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight", "exp_avg"));
  const Atom& atom = step.atom(*step.FindAtom(ParameterIndex{0}, "exp_avg"));
  EXPECT_EQ(atom.shape, (Shape{3, 3}));
  ASSERT_EQ(atom.source.gathers.size(), 1u);
  EXPECT_EQ(atom.source.gathers[0].locals.size(), 2u);
}

TEST_F(SettleTest, AStateOfItsOwnShapeIsNotJoinedFromParts) {
  dict_.unfit = StateDict::Unfit::kLeftOut;
  CutWeight();
  StateOn(0, "exp_avg_sq_row", {2});
  StateOn(1, "exp_avg_sq_row", {1});
  StateOn(0, "exp_avg", {3, 2});  // not that of the rank's part
  const StepModel step = Step();
  EXPECT_THAT(KindsOf(step, "a"), ElementsAre("weight"));
  ASSERT_EQ(step.left_out.size(), 2u);
  EXPECT_THAT(step.left_out[0].why, HasSubstr("ranks hold parts of it"));
  EXPECT_THAT(step.left_out[1].what, HasSubstr("([3, 2], the parameter [2, 3])"));
}

TEST_F(SettleTest, APartThatARankLacksIsFound) {
  CutWeight().place = On(0);
  ASSERT_TRUE(Settle(dict_, options_, assembler_));
  EXPECT_FALSE(std::move(assembler_).Finish());
}

TEST_F(SettleTest, WhatNoRuleSpreadsIsRefusedByName) {
  CutWeight();
  dict_.cuts = nullptr;
  const auto settled = Settle(dict_, options_, assembler_);
  ASSERT_FALSE(settled);
  EXPECT_EQ(settled.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(settled.error().message, HasSubstr("over the 2 tensor-parallel ranks: 'a'"));
}

TEST_F(SettleTest, AWeightThatIsNotStoredIsItsMasterCast) {
  Weight("a", {4}).place = nullptr;
  dict_.tensors[0].role = Role::kTrainable;
  State("a", "master", {4});
  dict_.states[0].kinds = StateDict::Kinds::kOurs;
  dict_.model_dtype = DType::kBF16;
  const StepModel step = Step();
  EXPECT_EQ(settled_.derived, 1u);
  const Atom& weight = step.atom(*step.FindAtom(ParameterIndex{0}, "weight"));
  EXPECT_TRUE(weight.derived);
  EXPECT_EQ(weight.dtype, DType::kBF16);
  EXPECT_EQ(step.model_dtype, DType::kBF16);
}

TEST_F(SettleTest, AWeightWithoutAMasterIsRefused) {
  Weight("a", {4}).place = nullptr;
  dict_.tensors[0].role = Role::kTrainable;
  dict_.model_dtype = DType::kBF16;
  const auto settled = Settle(dict_, options_, assembler_);
  ASSERT_FALSE(settled);
  EXPECT_THAT(settled.error().message, HasSubstr("no file has its weight or its master"));
}

TEST_F(SettleTest, LayersOfThePipelineCountWhereNoRuleHasThem) {
  Weight("0.w", {4}).layer = 0;
  Weight("1.w", {4}).layer = 1;
  Weight("tied.w", {4}).tied = true;
  const StepModel step = Step();
  EXPECT_EQ(step.layers, 2u);
  EXPECT_EQ(step.parameters[1].stage, StageRule::kLayer);
  EXPECT_EQ(step.parameters[1].layer, 1u);
  EXPECT_EQ(step.parameters[2].stage, StageRule::kFirstLast);
}

TEST_F(SettleTest, GroupsOfOneNumberAreOneGroupOfAllRanks) {
  dict_.optimizers.resize(2);
  Weight("a", {4});
  Weight("b", {4});
  dict_.groups.push_back({0, "", {{"a", std::nullopt}}, 0});
  dict_.groups.push_back({1, "", {{"a", std::nullopt}, {"b", std::nullopt}}, 0});
  const StepModel step = Step();
  ASSERT_EQ(step.groups.size(), 1u);
  EXPECT_THAT(step.groups[0].parameters, ElementsAre(ParameterIndex{0}, ParameterIndex{1}));
}

TEST_F(SettleTest, TwoTensorsOfOneNameAreRefused) {
  Weight("a", {4});
  Weight("a", {4});
  EXPECT_FALSE(Settle(dict_, options_, assembler_));
}

}  // namespace
}  // namespace ckptfs
