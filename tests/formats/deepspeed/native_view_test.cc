// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native_view/native_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/deepspeed/native_view/partitions.h"
#include "formats/torch/pickle_writer.h"
#include "tests/conformance/tiny_step.h"

namespace ckptfs::deepspeed {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Items = std::vector<std::pair<std::string, std::function<NodeId(PickleBuilder&)>>>;

std::vector<ParameterIndex> FirstParameters(uint32_t count) {
  std::vector<ParameterIndex> out;
  for (uint32_t i = 0; i < count; ++i) out.push_back(ParameterIndex{i});
  return out;
}

std::string PickledDict(const Items& items) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> entries;
  for (const auto& [key, value] : items) {
    const NodeId name = builder.String(key);
    entries.emplace_back(name, value(builder));
  }
  const NodeId root = builder.Dict(entries);
  return PrintPickle(std::move(builder).Finish(root)).value();
}

TinyStepOptions ConfiguredStep() {
  TinyStepOptions options;
  options.configured = true;
  options.groups = 2;
  return options;
}

std::shared_ptr<const ShownState> ShownIn(const StepModel& step, const std::string& layout) {
  return ShownState::Of(std::make_shared<const StepModel>(step), Layout::Parse(layout).value());
}

// "yes", or the refusal.
std::string NativeAnswer(const StepModel& step, const std::string& layout) {
  const auto view = NativeFormat().Open(ShownIn(step, layout));
  return view ? "yes" : view.error().message;
}

std::vector<std::string> FileNames(const StepModel& step, const std::string& layout) {
  const auto view = NativeFormat().Open(ShownIn(step, layout)).value();
  const auto listed = view->List("deepspeed_native/global_step5").value();
  std::vector<std::string> names;
  std::ranges::transform(listed, std::back_inserter(names), &ViewEntry::name);
  return names;
}

TEST(DealtOrderTest, EveryRankGetsEachOfThatManyInTurn) {
  const auto dealt = Dealt(FirstParameters(7), 3);
  EXPECT_THAT(
      dealt, ElementsAre(ParameterIndex{0}, ParameterIndex{3}, ParameterIndex{6}, ParameterIndex{1},
                         ParameterIndex{4}, ParameterIndex{2}, ParameterIndex{5}));
}

TEST(DealtOrderTest, IsUndone) {
  for (uint32_t count = 0; count < 12; ++count) {
    for (uint32_t ranks = 1; ranks < 14; ++ranks) {
      const auto members = FirstParameters(count);
      EXPECT_EQ(Undealt(Dealt(members, ranks), ranks), members) << count << " " << ranks;
    }
  }
}

// How often each element of each parameter lies in the partitions of all ranks.
std::map<ParameterIndex, std::vector<int>> Covered(const std::vector<FlatGroup>& groups,
                                                   const TargetEngine& engine) {
  std::map<ParameterIndex, std::vector<int>> times;
  for (const FlatGroup& group : groups) {
    for (const FlatMember& member : group.members) times[member.parameter].resize(member.elements);
    for (uint32_t dp = 0; dp < engine.dp; ++dp) {
      const Partition partition = PartitionOf(group, engine, dp);
      uint64_t elements = partition.padding;
      for (const FlatSpan& span : partition.spans) {
        elements += span.end - span.begin;
        for (uint64_t i = span.begin; i < std::min(span.end, span.member->elements); ++i) {
          ++times[span.member->parameter][i];
        }
      }
      EXPECT_EQ(elements, partition.elements);
      EXPECT_EQ(elements, PartitionOf(group, engine, 0).elements);
      EXPECT_TRUE(engine.stage == 3 || elements % 2 == 0);
    }
  }
  return times;
}

TEST(PartitionsTest, EachElementLiesInOnePartition) {
  const TinyStep tiny(ConfiguredStep());
  for (const char* layout : {"zero1", "dp2_zero1", "dp3_zero2", "dp7_zero2", "dp2_zero3",
                             "dp5_zero3", "tp2_dp3_zero3", "tp4_dp2_zero2"}) {
    SCOPED_TRACE(layout);
    const auto shown = ShownIn(tiny.model(), layout);
    const auto engine = TargetEngineOf(*shown).value();
    const auto groups = FlatGroupsOf(*shown, engine, RankCoordinate{}).value();
    for (const auto& [parameter, times] : Covered(groups, engine)) {
      EXPECT_TRUE(std::ranges::all_of(times, [](int n) { return n == 1; }));
    }
  }
}

TEST(PartitionsTest, SubGroupsEndWhereTheyReachTheirSize) {
  const TinyStep tiny(ConfiguredStep());
  const auto shown = ShownIn(tiny.model(), "dp2_zero3");
  const auto groups =
      FlatGroupsOf(*shown, TargetEngineOf(*shown).value(), RankCoordinate{}).value();
  for (size_t i = 0; i < groups.size(); ++i) {
    uint64_t elements = 0;  // of a rank, before the last member
    for (size_t m = 0; m + 1 < groups[i].members.size(); ++m) {
      elements += (groups[i].members[m].elements + 1) / 2;
    }
    EXPECT_LT(elements, 60u);
    elements += (groups[i].members.back().elements + 1) / 2;
    const bool last = i + 1 == groups.size() || groups[i + 1].number != groups[i].number;
    EXPECT_TRUE(last || elements >= 60);
  }
  EXPECT_GT(groups.size(), 2u);
}

TEST(NativeViewTest, NamesHaveThePrefixOfTheEnginesPrecision) {
  const TinyStep tiny(ConfiguredStep());
  EXPECT_THAT(
      FileNames(tiny.model(), "dp2_zero2"),
      ElementsAre("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                  "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"));
  EXPECT_THAT(FileNames(tiny.model(), "tp2_zero3_fp32"),
              ElementsAre("zero_pp_rank_0_mp_rank_00_model_states.pt",
                          "zero_pp_rank_0_mp_rank_00_optim_states.pt",
                          "zero_pp_rank_0_mp_rank_01_model_states.pt",
                          "zero_pp_rank_0_mp_rank_01_optim_states.pt"));
}

// A change of the step, a layout, and a part of the refusal.
using Refused = std::tuple<std::string, std::function<void(StepModel&)>, std::string, std::string>;

void SetConfiguration(StepModel& step, const Items& zero) {
  for (Document& document : step.documents) {
    if (document.key != "ds_config") continue;
    document.pickle = PickledDict({{"zero_optimization", [&](PickleBuilder& builder) {
                                      std::vector<std::pair<NodeId, NodeId>> entries;
                                      for (const auto& [key, value] : zero) {
                                        const NodeId name = builder.String(key);
                                        entries.emplace_back(name, value(builder));
                                      }
                                      return builder.Dict(entries);
                                    }}});
  }
}

void SetDocument(StepModel& step, const std::string& key,
                 const std::function<NodeId(PickleBuilder&)>& value) {
  for (Document& document : step.documents) {
    PickleBuilder builder;
    const NodeId root = value(builder);
    if (document.key == key) document.pickle = PrintPickle(std::move(builder).Finish(root)).value();
  }
}

// Another number of one parameter's, in place of its count of steps.
void AddNumbers(StepModel& step, const std::string& kind) {
  std::vector<Atom> numbers;
  for (Atom& atom : step.atoms) {
    if (atom.kind != "step") continue;
    numbers.push_back(atom);
    numbers.back().kind = kind;
  }
  numbers.back().source.inline_bytes[0] = 1;
  step.atoms.insert(step.atoms.end(), numbers.begin(), numbers.end());
}

void Narrow(StepModel& step) {
  for (Atom& atom : step.atoms) {
    if (atom.kind == "weight" && atom.dtype == DType::kBF16) atom.dtype = DType::kF16;
  }
}

const std::vector<Refused>& Refusals() {
  const auto truth = [](PickleBuilder& builder) { return builder.Bool(true); };
  const auto text = [](PickleBuilder& builder) { return builder.String("auto"); };
  static const std::vector<Refused> all = {
      {"universal", [](StepModel& s) { s.framework = "deepspeed_universal"; }, "zero1",
       "an order that only DeepSpeed's own saves tell"},
      {"pipeline", [](StepModel& s) { s.layout.naming = Naming::kPipe; }, "zero1",
       "is a PipelineModule"},
      {"weights alone", [](StepModel& s) { s.groups.clear(); }, "zero1",
       "the step has no optimizer"},
      {"no stage", [](StepModel&) {}, "dp2", "ask for zero1, zero2 or zero3"},
      {"dialect", [](StepModel&) {}, "zero1_hf", "other names than the source's"},
      {"no configuration",
       [](StepModel& s) {
         std::erase_if(s.documents, [](auto& d) { return d.key == "ds_config"; });
       },
       "zero1", "does not have the ds_config"},
      {"the name of a configuration",
       [](StepModel& s) {
         SetDocument(s, "ds_config", [](PickleBuilder& b) { return b.String("ds.json"); });
       },
       "zero1", "does not have the ds_config"},
      {"sub-groups",
       [=](StepModel& s) {
         SetConfiguration(s, {{"sub_group_size", text}});
       },
       "zero3", "is not a number of elements"},
      {"no group", [](StepModel& s) { s.groups[1].parameters.pop_back(); }, "zero1",
       "is in no group"},
      {"apart", [](StepModel& s) { s.groups[1].number = 0; }, "zero1",
       "other hyper-parameters on one rank than on another"},
      {"elastic", [](StepModel& s) { s.groups[0].hyper_parameters.clear(); }, "zero1",
       "has no hyper-parameters"},
      {"Muon",
       [=](StepModel& s) {
         s.groups[0].hyper_parameters = PickledDict({{"use_muon", truth}});
       },
       "zero1", "of DeepSpeed's Muon"},
      {"numbers", [](StepModel& s) { AddNumbers(s, "mu_product"); }, "zero1",
       "an engine has one for their group"},
      {"a number of one",
       [](StepModel& s) {
         const auto one = std::ranges::find(s.atoms, "exp_avg", &Atom::kind);
         one->relation = Relation::kScalar;
         one->shape = {};
       },
       "zero1", "an engine has one for their group"},
      {"counts",
       [](StepModel& s) {
         for (Atom& atom : s.atoms) {
           if (atom.kind == "step") atom.source.inline_bytes[2] ^= 64;
           if (atom.kind == "step") break;
         }
       },
       "zero2", "whose steps an engine counts once"},
      {"loss scale", Narrow, "zero3", "takes its loss scale from the files"},
      {"cut", [](StepModel& s) { s.parameters[0].source_pattern = Pattern::Replicate(); },
       "tp4_zero1", "cut it by rules of its own"},
      {"not cut", [](StepModel& s) { s.layout.tp = 1; }, "tp2_zero1",
       "nothing tells how one of tp2 does"},
      {"tag", [](StepModel& s) { s.id = "latest"; }, "zero1", "cannot be the name of a directory"},
      {"dealt",
       [](StepModel& s) {
         s.layout.zero = 2;
         s.documents.push_back({"zero/zero_stage", "", PickledDict({}), {}});
         s.groups[0].parameters.push_back(ParameterIndex{7});  // a frozen bias
       },
       "zero1", "dealt out parameters that are not trained"},
  };
  return all;
}

TEST(NativeViewTest, WhatNoEngineWouldTakeIsRefusedByName) {
  const TinyStep tiny(ConfiguredStep());
  for (const auto& [name, change, layout, words] : Refusals()) {
    SCOPED_TRACE(name);
    StepModel step = tiny.model();
    change(step);
    step.BuildIndex();
    EXPECT_THAT(NativeAnswer(step, layout), HasSubstr(words));
  }
  EXPECT_EQ(NativeAnswer(tiny.model(), "zero1"), "yes");
}

// A source's own order is undone for its dp before it is dealt for the layout's.
TEST(NativeViewTest, DealtSourcesAreShownInAnyStagesOrder) {
  const TinyStep tiny(ConfiguredStep());
  StepModel step = tiny.model();
  const std::vector<ParameterIndex> members = step.groups[0].parameters;
  step.layout.zero = 2;
  step.layout.dp = 3;
  step.groups[0].parameters = Dealt(members, 3);
  step.documents.push_back({"zero/zero_stage", "", PickledDict({}), {}});
  step.BuildIndex();
  const auto order = [&](const char* layout) {
    return TargetEngineOf(*ShownIn(step, layout)).value().groups[0];
  };
  EXPECT_EQ(order("dp3_zero1"), Dealt(members, 3));
  EXPECT_EQ(order("dp2_zero2"), Dealt(members, 2));
  EXPECT_EQ(order("dp2_zero3"), members);
}

}  // namespace
}  // namespace ckptfs::deepspeed
