// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/target_groups.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "core/model/step_counts.h"
#include "core/view/reader_demands.h"
#include "formats/megatron/group_rule.h"
#include "formats/megatron/view_entries.h"
#include "formats/optimizer/hyper_parameters.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/pickle/pickle_reader.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kAdam[] = {"exp_avg", "exp_avg_sq", "step"};
constexpr std::string_view kAsked[] = {"exp_avg", "exp_avg_sq"};

constexpr ReaderDemands kDistributedOptimizer = {
    .reader = "Megatron's distributed optimizer",
    .remedy = "dcp/ and rank<N>/optimizer.safetensors have every state",
    .asks = kAsked,
    .takes = kAdam,
    .counts = ReaderDemands::Counts::kOnce,
    .flat = true,
    .numbers = false,
    .own_shapes = false,
    .optimizers = false,
};

constexpr std::string_view kExpertsMark = "is_expert_parallel";
constexpr std::string_view kDecayMark = "wd_mult";
constexpr std::string_view kDecay = "weight_decay";
constexpr std::string_view kStep = "step";
constexpr std::string_view kFirstRate = "initial_lr";  // torch's schedules keep it
// The hyper-parameters of other Adams that Megatron's has.
constexpr std::string_view kOfAdam[] = {"lr", "betas", "eps", kDecay};

std::string Printed(PickleRef value) {
  PickleBuilder builder;
  const NodeId copy = builder.Copy(value);
  auto pickle = PrintPickle(std::move(builder).Finish(copy));
  return pickle ? *std::move(pickle) : std::string();
}

template <class Make>
std::string PrintedNew(const Make& make) {
  PickleBuilder builder;
  const NodeId root = make(builder);
  auto pickle = PrintPickle(std::move(builder).Finish(root));
  CKPT_CHECK(pickle.has_value());
  return *std::move(pickle);
}

std::string PrintedBool(bool value) {
  return PrintedNew([&](PickleBuilder& b) { return b.Bool(value); });
}
std::string PrintedFloat(double value) {
  return PrintedNew([&](PickleBuilder& b) { return b.Float(value); });
}

using Values = std::map<std::string, std::string, std::less<>>;  // by key, printed

class Maker {
 public:
  explicit Maker(const ShownState& shown)
      : shown_(shown),
        step_(shown.step()),
        own_(step_.facts.modules.has_value() || TraitsOf(step_).mcore_state) {}

  Result<TargetGroups> Make() && {
    CKPT_RETURN_IF_ERROR(CheckDemands(shown_, kDistributedOptimizer, shown_.layout()));
    CKPT_RETURN_IF_ERROR(CheckStates());
    out_.experts_apart = shown_.layout().ep > 1 && AnyExperts();
    for (const ShownGroup& group : shown_.groups()) CKPT_RETURN_IF_ERROR(AddGroup(group));
    if (made_.empty()) return Fail(Unknown());
    CKPT_ASSIGN_OR_RETURN(const int64_t step, CommonStep());
    for (const bool experts : {false, true}) {
      if (experts && !out_.experts_apart) break;
      for (const bool decays : {true, false}) Place({experts, decays}, step);
    }
    return std::move(out_);
  }

 private:
  struct Key {
    bool experts = false;
    bool decays = true;
    auto operator<=>(const Key&) const = default;
  };
  struct Made {
    Values values;
    ParameterIndex first{};          // whose they are
    const ShownGroup* of = nullptr;  // the source's group that was compared last
  };

  static Error Unknown() {
    return Error{ErrorCode::kUnsupported,
                 "the hyper-parameters of the optimizer's groups are not known"};
  }

  bool AnyExperts() const {
    return std::ranges::any_of(step_.parameters,
                               [](const Parameter& p) { return IsExperts(p.name); });
  }

  // All that is trained has the states that its optimizer asks for.
  Status CheckStates() const {
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      const ParameterIndex p{i};
      if (step_.parameters[i].role != Role::kTrainable) continue;
      CKPT_RETURN_IF_ERROR(MasterOf(shown_, p));
      const StatesByKind states = shown_.StatesOf(p);
      for (const std::string_view kind : kAsked) {
        if (states.contains(kind)) continue;
        return Fail(
            Error{ErrorCode::kUnsupported, StrCat("it is trained, but has no state '", kind, "'")}
                .OfParameter(shown_.NameOf(p)));
      }
    }
    return {};
  }

  Result<int64_t> CommonStep() const {
    std::optional<double> common = counted_;
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      const auto steps = StepsOf(step_, ParameterIndex{i});
      if (!steps) continue;
      if (common && *common != *steps) {
        return Fail(Error{ErrorCode::kUnsupported,
                          StrCat("its step is ", *steps, ", but that of others ", *common,
                                 ", and Megatron's optimizer has one for all")}
                        .OfParameter(step_.parameters[i].name));
      }
      common = steps;
    }
    const auto whole = static_cast<int64_t>(common.value_or(-1));
    if (!common || whole < 0 || static_cast<double>(whole) != *common) {
      return Fail(ErrorCode::kUnsupported, "the number of the optimizer's steps is not known");
    }
    return whole;
  }

  Status AddGroup(const ShownGroup& group) {
    if (group.members.empty()) return {};
    if (group.recorded == nullptr) return Fail(Unknown());
    auto tree = own_ ? RecordedHyperParameters(*group.recorded)
                     : TorchHyperParameters(shown_, group, false);
    if (!tree) return Fail(std::move(tree).error());
    const PickleRef dict = RootOf(*tree);
    if (const auto steps = dict[kStep].Number()) {
      if (counted_ && *counted_ != *steps) {
        return Fail(ErrorCode::kUnsupported,
                    "groups count different steps, and Megatron's optimizer has one for all");
      }
      counted_ = steps;
    }
    CKPT_ASSIGN_OR_RETURN(const Values values, own_ ? OwnValues(dict) : AdamsValues(dict));
    for (const ParameterIndex p : group.members) {
      CKPT_RETURN_IF_ERROR(AddMember(p, group, values, dict[kDecay].Number().value_or(0)));
    }
    return {};
  }

  static Result<Values> OwnValues(PickleRef dict) {
    Values values;
    for (const auto& [key, value] : dict.Items()) {
      const auto name = key.String();
      if (!name || *name == kExpertsMark || *name == kDecayMark || *name == kStep) continue;
      values.emplace(*name, Printed(value));
    }
    if (!dict["lr_mult"] || !dict["is_decoupled_lr"]) {
      return Fail(ErrorCode::kUnsupported,
                  "a group of its optimizer does not have Megatron's marks (lr_mult, "
                  "is_decoupled_lr)");
    }
    return values;
  }

  static Result<Values> AdamsValues(PickleRef dict) {
    Values values;
    for (const std::string_view name : kOfAdam) {
      if (!dict[name]) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat("a group of its optimizer does not say '", name, "'"));
      }
      values.emplace(name, Printed(dict[name]));
    }
    if (dict["amsgrad"].Bool().value_or(false) || dict["maximize"].Bool().value_or(false)) {
      return Fail(ErrorCode::kUnsupported,
                  "a group of its optimizer has amsgrad or maximize, which Megatron's does not");
    }
    if (dict[kFirstRate]) values.emplace(kFirstRate, Printed(dict[kFirstRate]));
    values.emplace("bias_correction", PrintedBool(dict["bias_correction"].Bool().value_or(true)));
    values.emplace("default_config", PrintedBool(true));
    values.emplace("lr_mult", PrintedFloat(1.0));
    values.emplace("is_decoupled_lr", PrintedBool(false));
    return values;
  }

  Status AddMember(ParameterIndex p, const ShownGroup& group, const Values& values, double decay) {
    const Parameter& parameter = step_.parameter(p);
    const Key key{out_.experts_apart && IsExperts(parameter.name),
                  Decays(parameter.name, parameter.shape)};
    auto made = made_.find(key);
    const bool fresh = made == made_.end();
    if (fresh) made = made_.emplace(key, Made{values, p, &group}).first;
    if (made->second.of != &group) {
      CKPT_RETURN_IF_ERROR(Compare(made->second, values, p));
      made->second.of = &group;  // the next member's values are these
    }
    if (own_ || !fresh || key.decays == (decay != 0)) return {};
    out_.notes.push_back(
        StrCat("the weight decay of the source's groups: '", parameter.name, "' has ", decay,
               ", but Megatron's groups decay all but biases and vectors, by its own arguments"));
    return {};
  }

  // Parameters of one group of Megatron's have the same.
  Status Compare(const Made& made, const Values& values, ParameterIndex p) const {
    const auto differs = [&](const Values& all, const Values& others) -> const std::string* {
      for (const auto& [name, value] : all) {
        const auto other = others.find(name);
        if (other == others.end() || other->second != value) return &name;
      }
      return nullptr;
    };
    const std::string* name = differs(made.values, values);
    if (name == nullptr) name = differs(values, made.values);
    if (name == nullptr) return {};
    return Fail(
        Error{ErrorCode::kUnsupported,
              StrCat("'", *name, "' is another one than that of '", shown_.NameOf(made.first),
                     "', which Megatron has in the same group of its optimizer")}
            .OfParameter(shown_.NameOf(p)));
  }

  // A group without members has the values of one beside it: Megatron looks for all of them.
  void Place(Key key, int64_t step) {
    auto found = made_.find(key);
    if (found == made_.end()) found = made_.find({key.experts, !key.decays});
    if (found == made_.end()) found = made_.find({!key.experts, key.decays});
    if (found == made_.end()) found = made_.begin();
    TargetGroup group{key.experts, key.decays, {}};
    group.values.emplace_back(kExpertsMark, PrintedBool(key.experts));
    group.values.emplace_back(kDecayMark, PrintedFloat(key.decays ? 1.0 : 0.0));
    for (const auto& [name, value] : found->second.values) {
      if (own_ || name != kFirstRate) group.values.emplace_back(name, value);
    }
    group.values.emplace_back(kStep, PrintedNew([&](PickleBuilder& b) { return b.Int(step); }));
    if (!own_) AddUnderRates(group, found->second.values);
    out_.groups.push_back(std::move(group));
  }

  // Later cores (0.19.2) find a group by the greatest and the least rate of the run's own
  // arguments, too, which another optimizer's groups do not have.  The group is there under each
  // pair that its rate makes likely; a run takes the one that it asks for by name, or fails.  Older
  // cores take the last one.
  void AddUnderRates(const TargetGroup& group, const Values& values) {
    std::set<std::string_view> greatest = {values.find("lr")->second};
    const auto first = values.find(kFirstRate);
    if (first != values.end()) greatest.insert(first->second);
    for (const std::string_view rate : greatest) {
      for (const bool least : {false, true}) {
        TargetGroup other = group;
        other.values.emplace_back("max_lr", rate);
        if (least) other.values.emplace_back("min_lr", PrintedFloat(0.0));
        out_.groups.push_back(std::move(other));
      }
    }
  }

  const ShownState& shown_;
  const StepModel& step_;
  const bool own_;  // the dicts are Megatron's
  std::map<Key, Made> made_;
  std::optional<double> counted_;  // by the groups
  TargetGroups out_;
};

Result<NodeId> PrintGroups(const TargetGroups& groups, bool experts, PickleBuilder& builder) {
  std::vector<NodeId> dicts;
  for (const TargetGroup& group : groups.groups) {
    if (group.experts != experts) continue;
    std::vector<std::pair<NodeId, NodeId>> items;
    for (const auto& [name, printed] : group.values) {
      CKPT_ASSIGN_OR_RETURN(const ParsedPickle value, ParsePickle(printed));
      const NodeId key = builder.String(name);
      items.emplace_back(key, builder.Copy(RootOf(value.tree)));
    }
    dicts.push_back(builder.Dict(items));
  }
  const NodeId key = builder.String("param_groups");
  const NodeId inner = builder.Dict({{key, builder.List(std::move(dicts))}});
  const NodeId optimizer = builder.String("optimizer");
  const NodeId type = builder.String("param_state_sharding_type");
  return builder.Dict({{optimizer, inner}, {type, builder.String("fully_reshardable")}});
}

}  // namespace

Result<std::optional<TargetGroups>> TargetGroupsOf(const ShownState& shown) {
  const bool any = std::ranges::any_of(shown.states(), [&](AtomIndex index) {
    return shown.step().IsOfModel(shown.step().atom(index)) &&
           shown.step().atom(index).kind != "step";
  });
  if (!any) return std::optional<TargetGroups>();
  CKPT_ASSIGN_OR_RETURN(TargetGroups groups, Maker(shown).Make());
  return std::optional(std::move(groups));
}

Result<NodeId> PrintOptimizer(const TargetGroups& groups, PickleBuilder& builder) {
  if (!groups.experts_apart) return PrintGroups(groups, false, builder);
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const bool experts : {false, true}) {
    CKPT_ASSIGN_OR_RETURN(const NodeId one, PrintGroups(groups, experts, builder));
    const NodeId number = builder.Int(experts ? 1 : 0);
    items.emplace_back(number, one);
  }
  return builder.Dict(items);
}

}  // namespace ckptfs::megatron
