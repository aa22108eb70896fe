// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_readers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "core/base/strings.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/torch/pickle_writer.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs::deepspeed {
namespace {

using testing::Contains;
using testing::HasSubstr;

// The states of an optimizer: TinyStep's moments under other names and in other forms.
struct Optimizer {
  std::string name;
  std::string first, second;      // instead of exp_avg and exp_avg_sq; "": there is none
  std::vector<std::string> more;  // numbers besides step
  bool step = true;
  std::string flat = "yes";  // of stages 1 and 2, or a part of the refusal
  std::string three = "yes";
};

// The states that torch.optim (2.13), DeepSpeed (0.19.7) and bitsandbytes keep.
const std::vector<Optimizer>& Optimizers() {
  static const std::vector<Optimizer> all = {
      {"Adam", "exp_avg", "exp_avg_sq", {}},
      {"Adadelta", "square_avg", "acc_delta", {}, true, "yes", "'acc_delta'"},
      {"Adagrad", "sum", "", {}, true, "yes", "'sum'"},
      {"Adamax", "exp_avg", "exp_inf", {}, true, "yes", "'exp_inf'"},
      {"ASGD", "ax", "", {"eta", "mu"}, true, "'eta'", "'ax'"},
      {"NAdam", "exp_avg", "exp_avg_sq", {"mu_product"}, true, "'mu_product'", "'mu_product'"},
      {"RMSprop", "square_avg", "momentum_buffer", {}, true, "yes", "'momentum_buffer'"},
      {"Rprop", "prev", "step_size", {}, true, "yes", "'prev'"},
      {"SGD", "momentum_buffer", "", {}, false, "yes", "'momentum_buffer'"},
      {"SGD without momentum", "", "", {}, false, "yes", "'exp_avg'"},
      {"Lion", "exp_avg", "", {}, false, "yes", "'exp_avg_sq'"},
      {"CPUAdagrad", "", "exp_avg_sq", {}, true, "yes", "'exp_avg'"},
      {"transformers.Adafactor", "exp_avg", "exp_avg_sq", {"RMS"}},
  };
  return all;
}

void Rename(StepModel& step, const std::string& from, const std::string& to) {
  for (Atom& atom : step.atoms) {
    if (atom.kind == from) atom.kind = to;
  }
}

StepModel StepOf(const TinyStep& tiny, const Optimizer& optimizer) {
  StepModel step = tiny.model();
  Rename(step, "exp_avg", optimizer.first == "" ? "weight" : "first");
  Rename(step, "exp_avg_sq", optimizer.second == "" ? "weight" : "second");
  Rename(step, "first", optimizer.first);
  Rename(step, "second", optimizer.second);
  std::vector<Atom> numbers;
  for (const Atom& atom : step.atoms) {
    for (const std::string& kind : optimizer.more) {
      if (atom.kind != "step") continue;
      numbers.push_back(atom);
      numbers.back().kind = kind;
    }
  }
  if (!optimizer.step) Rename(step, "step", "grad");
  step.atoms.insert(step.atoms.end(), numbers.begin(), numbers.end());
  step.BuildIndex();
  return step;
}

std::string Answer(const StepModel& step, const std::string& layout) {
  const auto view = UniversalFormat().Open(
      ShownState::Of(std::make_shared<const StepModel>(step), Layout::Parse(layout).value()));
  return view ? "yes" : view.error().message;
}

TEST(UniversalReadersTest, AnOptimizerIsShownToTheStagesThatTakeAllOfItsStates) {
  const TinyStep tiny({});
  for (const Optimizer& optimizer : Optimizers()) {
    SCOPED_TRACE(optimizer.name);
    const StepModel step = StepOf(tiny, optimizer);
    for (const char* layout : {"tp1", "dp2_zero1", "dp3_zero2"}) {
      EXPECT_THAT(Answer(step, layout), HasSubstr(optimizer.flat)) << layout;
    }
    EXPECT_THAT(Answer(step, "dp2_zero3"), HasSubstr(optimizer.three));
    const auto shown = ShownState::Of(std::make_shared<const StepModel>(step), Layout{});
    EXPECT_EQ(StageThreeLoads(*shown), optimizer.three == "yes");
  }
}

TEST(UniversalReadersTest, ARefusalNamesTheReaderTheParameterAndWhatHelps) {
  const TinyStep tiny({});
  const StepModel step = StepOf(tiny, Optimizers().at(8));  // SGD with momentum
  const auto view = UniversalFormat().Open(
      ShownState::Of(std::make_shared<const StepModel>(step), Layout::Parse("dp2_zero3").value()));
  ASSERT_FALSE(view);
  EXPECT_EQ(view.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(view.error().parameter, "embed.weight");
  EXPECT_THAT(view.error().message, HasSubstr("a DeepSpeed engine at ZeRO-3"));
  EXPECT_THAT(view.error().needs, HasSubstr("zero1"));
}

TEST(UniversalReadersTest, StatesOfOtherFormsAreRefused) {
  const TinyStep tiny({});
  for (const auto& [relation, dtype, why] :
       {std::tuple(Relation::kReduced, DType::kF32, "another shape"),
        std::tuple(Relation::kOpaque, DType::kU8, "another shape"),
        std::tuple(Relation::kSame, DType::kU8, "keeps states as fp32")}) {
    StepModel step = tiny.model();
    for (Atom& atom : step.atoms) {
      if (atom.kind != "exp_avg") continue;
      atom.relation = relation;
      atom.dtype = dtype;
    }
    EXPECT_THAT(Answer(step, "dp2_zero1"), HasSubstr(why));
    EXPECT_THAT(Answer(step, "dp2_zero3"), HasSubstr(why));
  }
}

// Two groups, of which one has Muon's momentum and the other Adam's moments.
StepModel OfMuon(const TinyStep& tiny, const char* word) {
  StepModel step = tiny.model();
  PickleBuilder builder;
  const NodeId root = builder.Dict(
      {{builder.String("lr"), builder.Float(0.01)}, {builder.String(word), builder.Int(5)}});
  step.groups[0].hyper_parameters = PrintPickle(std::move(builder).Finish(root)).value();
  for (const ParameterIndex p : step.groups[0].parameters) {
    for (Atom& atom : step.atoms) {
      if (atom.parameter != p) continue;
      if (atom.kind == "exp_avg") atom.kind = "momentum_buffer";
      if (atom.kind == "exp_avg_sq" || atom.kind == "step") atom.kind = "grad";
    }
  }
  step.BuildIndex();
  return step;
}

TEST(UniversalReadersTest, ZerosAreNotMadeUpForAStateThatAWholeGroupLacks) {
  TinyStepOptions options;
  options.groups = 2;
  const TinyStep tiny(options);
  const StepModel step = OfMuon(tiny, "use_muon");
  const auto view = UniversalFormat()
                        .Open(ShownState::Of(std::make_shared<const StepModel>(step), Layout{}))
                        .value();
  const auto has = [&](const std::string& parameter, const std::string& file) {
    return view->Find(StrCat("deepspeed/global_step5/zero/", parameter, "/", file)).has_value();
  };
  EXPECT_TRUE(has("embed.weight", "momentum_buffer.pt"));
  EXPECT_FALSE(has("embed.weight", "exp_avg.pt"));
  EXPECT_FALSE(has("embed.weight", "step.pt"));
  EXPECT_FALSE(has("layers.0.norm.weight", "momentum_buffer.pt"));
  EXPECT_TRUE(has("layers.0.norm.weight", "exp_avg.pt"));
  EXPECT_THAT(Answer(step, "dp2_zero3"), HasSubstr("'momentum_buffer'"));
}

// A parameter without a gradient has no state; one that lacks a part of them lost it.
TEST(UniversalReadersTest, ZerosAreNotMadeUpForAStateThatWasLost) {
  const TinyStep tiny({});
  const auto without = [&](std::vector<std::string_view> kinds) {
    StepModel step = tiny.model();
    for (Atom& atom : step.atoms) {
      const bool first = step.parameter(atom.parameter).name == "embed.weight";
      if (first && std::ranges::find(kinds, atom.kind) != kinds.end()) atom.kind = "grad";
    }
    step.BuildIndex();
    return step;
  };
  StepModel never = without({"exp_avg", "exp_avg_sq", "step"});
  for (const char* layout : {"zero1", "dp2_zero3"}) {
    EXPECT_EQ(Answer(never, layout), "yes");
    EXPECT_THAT(Answer(without({"exp_avg"}), layout),
                HasSubstr("'embed.weight' has other states, so it did not begin at zero"));
    EXPECT_THAT(Answer(without({"exp_avg", "exp_avg_sq"}), layout), HasSubstr("has other states"));
  }
  LeaveOut(never, {LeftOutPart::kOptimizer, "states of 'embed.weight'", "they are a list", ""});
  for (const char* layout : {"zero1", "dp2_zero3"}) {
    EXPECT_THAT(Answer(never, layout), HasSubstr("left out (states of 'embed.weight')"));
  }
  never.groups.clear();  // the states make one
  EXPECT_THAT(Answer(never, "zero1"), HasSubstr("left out (states of 'embed.weight')"));
}

TEST(UniversalReadersTest, MomentumOfWholeParametersIsNotCutForRanks) {
  TinyStepOptions options;
  options.groups = 2;
  const TinyStep tiny(options);
  for (const char* word : {"use_muon", "ns_steps", "ns_coefficients"}) {
    EXPECT_EQ(Answer(OfMuon(tiny, word), "zero1"), "yes");
    EXPECT_THAT(Answer(OfMuon(tiny, word), "dp2_zero1"), HasSubstr("whole parameters"));
  }
  EXPECT_EQ(Answer(OfMuon(tiny, "nesterov"), "dp2_zero1"), "yes");  // SGD's
}

TEST(UniversalReadersTest, AGroupWithoutStatesBeginsAnewAndThatIsSaid) {
  TinyStepOptions options;
  options.groups = 2;
  const TinyStep tiny(options);
  StepModel step = tiny.model();
  for (const ParameterIndex p : step.groups[1].parameters) {
    for (Atom& atom : step.atoms) {
      if (atom.parameter == p && atom.kind != "weight" && atom.kind != "master") atom.kind = "grad";
    }
  }
  step.BuildIndex();
  const auto shared = std::make_shared<const StepModel>(step);
  const auto view =
      UniversalFormat().Open(ShownState::Of(shared, Layout::Parse("dp2_zero1").value()));
  ASSERT_TRUE(view) << view.error().message;
  EXPECT_THAT((*view)->LeftOut(), Contains(HasSubstr("states of group 1")));
  EXPECT_FALSE((*view)->Find("deepspeed/global_step5/zero/layers.0.norm.weight/exp_avg.pt"));
  EXPECT_THAT(Answer(step, "dp2_zero3"), HasSubstr("asks for"));
}

// An averaged copy of the weights is not a state that the engine would lose, nor one of its
// buffers.
TEST(UniversalReadersTest, TensorsBesideTheModelAreNotAskedFor) {
  const TinyStep tiny({});
  StepModel step = tiny.model();
  const auto lines = [&](const std::string& layout) {
    const auto view = UniversalFormat().Open(
        ShownState::Of(std::make_shared<const StepModel>(step), Layout::Parse(layout).value()));
    return view ? (*view)->LeftOut() : std::vector<std::string>{view.error().message};
  };
  const auto before = std::pair(lines("dp2_zero1"), lines("dp2_zero3"));
  Parameter beside = step.parameters[0];
  beside.name = "ema";
  beside.role = Role::kBeside;
  step.parameters.push_back(std::move(beside));
  Atom value = step.atoms[0];
  value.parameter = ParameterIndex{static_cast<uint32_t>(step.parameters.size() - 1)};
  value.kind = kBesideKind;
  value.dtype = DType::kI64;
  step.atoms.push_back(std::move(value));
  step.BuildIndex();
  EXPECT_EQ(lines("dp2_zero1"), before.first);
  EXPECT_EQ(lines("dp2_zero3"), before.second);
}

// A universal directory has the groups' hyper-parameters and does not say who is in them.
TEST(UniversalReadersTest, AGroupWithoutRecordedMembersAsksForNothing) {
  const TinyStep tiny({});
  StepModel step = tiny.model();
  ASSERT_FALSE(step.groups.empty());
  for (Group& group : step.groups) group.parameters.clear();
  step.BuildIndex();
  for (const char* layout : {"tp1", "dp2_zero1", "dp2_zero3"}) {
    EXPECT_EQ(Answer(step, layout), "yes") << layout;
  }
  const auto shown = ShownState::Of(std::make_shared<const StepModel>(step), Layout{});
  EXPECT_TRUE(StageThreeLoads(*shown));
}

TEST(UniversalReadersTest, AStateThatBeginsElsewhereIsNotFilledWithZeros) {
  TinyStepOptions options;
  options.lazy_state = true;
  const TinyStep tiny(options);
  EXPECT_EQ(Answer(tiny.model(), "dp2_zero1"), "yes");
  EXPECT_THAT(Answer(StepOf(tiny, Optimizers().at(7)), "dp2_zero1"), HasSubstr("'step_size'"));
  EXPECT_THAT(Answer(StepOf(tiny, Optimizers().at(2)), "dp2_zero1"), HasSubstr("'sum'"));
}

// A rank with nothing of a group finds no step there, and the loader asks for the first.
TEST(UniversalReadersTest, AGroupTooSmallForItsRanksIsRefused) {
  const TinyStep tiny({});
  StepModel step = tiny.model();
  const ParameterIndex temperature = step.FindParameter("temperature").value();
  std::erase(step.groups[0].parameters, temperature);
  step.groups.push_back(step.groups[0]);
  step.groups[1].parameters = {temperature};
  EXPECT_EQ(Answer(step, "zero1"), "yes");
  EXPECT_THAT(Answer(step, "dp2_zero1"), HasSubstr("group 1 has 1 element "));
  EXPECT_EQ(Answer(step, "dp2_zero3"), "yes");
}

TEST(UniversalReadersTest, StatesOfTwoOptimizersOfOneParameterAreRefused) {
  const TinyStep tiny({});
  StepModel step = tiny.model();
  step.atoms.push_back(step.atom(step.FindAtom(ParameterIndex{0}, "exp_avg").value()));
  step.atoms.back().optimizer = "other";
  step.BuildIndex();
  EXPECT_THAT(Answer(step, "dp2_zero1"), HasSubstr("two optimizers"));
}

}  // namespace
}  // namespace ckptfs::deepspeed
