// SPDX-License-Identifier: Apache-2.0

#include "core/view/shown_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/view/reader_demands.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

ParameterIndex P(uint32_t i) { return ParameterIndex{i}; }
AtomIndex A(uint32_t i) { return AtomIndex{i}; }

void AddParameter(StepModel& step, const std::string& name, Role role = Role::kTrainable) {
  Parameter parameter;
  parameter.name = name;
  parameter.role = role;
  parameter.shape = {2};
  step.parameters.push_back(std::move(parameter));
}

AtomIndex AddAtom(StepModel& step, uint32_t parameter, const std::string& kind,
                  DType dtype = DType::kF32, const std::string& optimizer = "") {
  Atom atom;
  atom.parameter = P(parameter);
  atom.kind = kind;
  atom.optimizer = optimizer;
  atom.dtype = dtype;
  atom.shape = {2};
  step.atoms.push_back(std::move(atom));
  return A(static_cast<uint32_t>(step.atoms.size() - 1));
}

std::shared_ptr<const ShownState> Shown(StepModel step, std::string_view layout = "tp1") {
  step.BuildIndex();
  return ShownState::Of(std::make_shared<const StepModel>(std::move(step)),
                        Layout::Parse(layout).value());
}

TEST(ShownStateTest, AWeightIsCastFromItsMasterAndABufferNever) {
  StepModel step;
  step.model_dtype = DType::kBF16;
  for (const char* name : {"both", "master", "none"}) AddParameter(step, name);
  AddParameter(step, "buffer", Role::kBuffer);
  AddAtom(step, 0, "weight", DType::kBF16);
  AddAtom(step, 0, "master");
  AddAtom(step, 1, "master");
  AddAtom(step, 3, "weight", DType::kF64);
  const auto stored = Shown(step);
  EXPECT_EQ(stored->WeightOf(P(0))->atom, A(0));
  EXPECT_FALSE(stored->WeightOf(P(0))->derived);
  EXPECT_EQ(stored->WeightOf(P(1))->dtype, DType::kBF16);
  EXPECT_TRUE(stored->WeightOf(P(1))->derived);
  EXPECT_FALSE(stored->FindWeight(P(2)));
  EXPECT_EQ(stored->WeightOf(P(2)).error().parameter, "none");
  const auto wide = Shown(step, "tp1_fp32");
  EXPECT_EQ(wide->WeightOf(P(0))->atom, A(1));
  EXPECT_EQ(wide->WeightOf(P(0))->dtype, DType::kF32);
  EXPECT_EQ(wide->WeightOf(P(3))->dtype, DType::kF64);
}

TEST(ShownStateTest, StatesAreThoseOfOptimizersAndTheFirstOfAKindIsNamedByItAlone) {
  StepModel step;
  AddParameter(step, "w");
  AddAtom(step, 0, "step");
  AddAtom(step, 0, "weight");
  AddAtom(step, 0, "exp_avg");
  AddAtom(step, 0, "master");
  AddAtom(step, 0, "exp_avg", DType::kF32, "second");
  AddAtom(step, 0, "grad");
  const auto shown = Shown(step);
  EXPECT_THAT(shown->states(), ElementsAre(A(0), A(2), A(4)));
  EXPECT_THAT(shown->StatesOf(P(0)), ElementsAre(Pair("exp_avg", A(2)), Pair("step", A(0))));
  std::vector<AtomIndex> first, second;
  for (const ShownAtom& atom : shown->AtomsOf(P(0))) {
    (atom.first ? first : second).push_back(atom.atom);
  }
  EXPECT_THAT(first, ElementsAre(A(2), A(5), A(3), A(0), A(1)));
  EXPECT_THAT(second, ElementsAre(A(4)));
}

// An averaged copy of the weights is nobody's state: no reader is asked whether it takes it.
TEST(ShownStateTest, TensorsBesideTheModelAreNotStates) {
  StepModel step;
  AddParameter(step, "w");
  AddParameter(step, "beside/w", Role::kBeside);
  AddAtom(step, 0, "weight");
  AddAtom(step, 1, std::string(kBesideKind), DType::kI64);
  step.groups = {{"", {P(0)}, ""}};
  const auto shown = Shown(step);
  EXPECT_THAT(shown->states(), IsEmpty());
  constexpr std::string_view kTaken[] = {"exp_avg"};
  const ReaderDemands reader{.reader = "a reader", .remedy = "", .takes = kTaken, .flat = true};
  EXPECT_TRUE(CheckDemands(*shown, reader, Layout{}));
}

TEST(ShownStateTest, AGroupHasTheKindsOfItsTrainedMembersAndTheRestIsTheLast) {
  StepModel step;
  for (const char* name : {"a", "b", "alone", "new"}) AddParameter(step, name);
  AddParameter(step, "frozen", Role::kFrozen);
  AddAtom(step, 1, "exp_avg");
  AddAtom(step, 0, "exp_avg");
  AddAtom(step, 2, "sum");
  step.groups = {{"", {P(4), P(0), P(1)}, ""}};
  const auto shown = Shown(step);
  ASSERT_EQ(shown->groups().size(), 2u);
  EXPECT_THAT(shown->groups()[0].members, ElementsAre(P(0), P(1)));
  EXPECT_THAT(shown->groups()[0].kinds, ElementsAre(Pair("exp_avg", A(1))));
  EXPECT_EQ(shown->groups()[1].recorded, nullptr);
  EXPECT_THAT(shown->groups()[1].members, ElementsAre(P(2)));
  step.groups.clear();
  EXPECT_THAT(Shown(step)->groups()[0].members, ElementsAre(P(0), P(1), P(2), P(3)));
}

TEST(ShownStateTest, ALayoutWithoutNamesIsRefusedOnlyWhereTheyAreAskedFor) {
  StepModel step;
  AddParameter(step, "w");
  AddAtom(step, 0, "weight");
  step.aliases = {{"head", P(0)}};
  const auto own = Shown(step);
  EXPECT_TRUE(own->CheckNames());
  EXPECT_EQ(own->NameOf(P(0)), "w");
  ASSERT_EQ(own->aliases().size(), 1u);
  EXPECT_EQ(own->aliases()[0].name, "head");
  const auto piped = Shown(step, "tp1_pipe");
  ASSERT_FALSE(piped->CheckNames());
  EXPECT_THAT(piped->CheckNames().error().message, HasSubstr("naming 'pipe'"));
  EXPECT_TRUE(piped->FindWeight(P(0)));
}

}  // namespace
}  // namespace ckptfs
