// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/member_owners.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/model_choice.h"
#include "core/state/roles.h"
#include "core/state/state_fit.h"
#include "core/state/trained_module.h"

namespace ckptfs {
namespace {

constexpr std::string_view kAlone =
    "save it with names (get_optimizer_state_dict); `--weights-only` takes the weights alone, "
    "without this message";

constexpr std::string_view kAverage =
    "`--model KEY` takes what was trained, where the file has it; `--weights-only` takes the "
    "weights alone, without this message";

constexpr std::string_view kOther =
    "`--model KEY` takes another module; `--parameter-order` says which parameters it trains; "
    "`--weights-only` takes the weights alone, without this message";

class Owners {
 public:
  Owners(const StateDict& dict, const SourceOptions& options, StepModel& header)
      : dict_(dict), options_(options), header_(header) {
    for (size_t i = 0; i < dict.tensors.size(); ++i) names_.emplace(dict.tensors[i].name, i);
  }

  Result<MemberOwners> Run() {
    out_.numbers.resize(dict_.optimizers.size());
    out_.groups.resize(dict_.groups.size());
    for (size_t g = 0; g < dict_.groups.size(); ++g)
      groups_[dict_.groups[g].optimizer].push_back(g);
    size_t numbered = 0;
    for (size_t o = 0; o < dict_.optimizers.size(); ++o) numbered += HasNumbers(o);
    // The user's word says whose an optimizer is.
    const bool told = !options_.parameter_order.empty();
    const bool alone = dict_.modules.empty() || told;
    const bool average = !told && !dict_.optimizers.empty() && IsAverage();
    for (size_t o = 0; o < dict_.optimizers.size(); ++o) {
      if (average) {
        out_.of_others.insert(o);
        LeaveOutAll(LeftOutPart::kOptimizer, o,
                    "the model is an average of weights, which an optimizer does not train",
                    kAverage);
        continue;
      }
      if (alone && AreAllNames(o)) continue;
      const std::vector<size_t> places = Trainable(o);
      const TrainableModule model = ModelOf(places);
      const OptimizerOwner owner = alone ? OptimizerOwner() : Owner(o, model);
      if (owner.module != TrainedModule::kModel) {
        out_.of_others.insert(o);
        // An optimizer that may be the model's is missing from it; another module's is not.
        const bool another = owner.module == TrainedModule::kAnother;
        LeaveOutAll(another ? LeftOutPart::kDocument : LeftOutPart::kOptimizer, o, owner.why,
                    kOther);
        continue;
      }
      if (!alone && AreAllNames(o)) continue;
      if (numbered > 1 && HasNumbers(o)) {
        LeaveOutAll(LeftOutPart::kOptimizer, o,
                    StrCat(numbered,
                           " optimizers number their parameters, but --parameter-order "
                           "is for one optimizer only"),
                    kAlone);
        continue;
      }
      CKPT_RETURN_IF_ERROR(Decide(o, places, model));
    }
    return std::move(out_);
  }

 private:
  bool IsAverage() const {
    std::vector<ModelCandidate::Tensor> tensors;
    for (const StateDict::Tensor& one : dict_.tensors) {
      tensors.push_back({one.name, one.dtype, one.shape});
    }
    return IsAverageState(tensors);
  }

  // The model with the parameters at `places` of its tensors.
  TrainableModule ModelOf(const std::vector<size_t>& places) const {
    TrainableModule model{dict_.model, {}};
    for (const size_t i : places) {
      model.parameters.push_back({dict_.tensors[i].name, dict_.tensors[i].shape});
    }
    return model;
  }

  // The states that are told of each member, by name or number.
  std::map<StateDict::Owner, std::vector<MemberState>> StatesOf(size_t optimizer) const {
    std::map<StateDict::Owner, std::vector<MemberState>> out;
    for (const StateDict::State& state : dict_.states) {
      if (state.optimizer != optimizer) continue;
      auto& states = out[state.owner];
      if (state.shape) states.push_back({state.kind, *state.shape});
    }
    return out;
  }

  OptimizerOwner Owner(size_t optimizer, const TrainableModule& model) {
    auto members = StatesOf(optimizer);
    std::map<int64_t, std::string_view> names;  // of members with both
    for (const size_t g : groups_[optimizer]) {
      for (const auto& member : dict_.groups[g].members) {
        if (member.number) {
          names.emplace(*member.number, member.name);
          members.try_emplace(*member.number);
        } else {
          members.try_emplace(member.name);
        }
      }
    }
    const StateDict::Optimizer& of = dict_.optimizers[optimizer];
    OptimizerOfState asked{of.key, {}, {}};
    std::deque<Shape> shapes;
    for (const auto& [owner, states] : members) {
      const auto* const name = std::get_if<std::string>(&owner);
      std::vector<std::pair<std::string_view, const Shape*>> told;
      for (const MemberState& state : states) told.emplace_back(state.kind, &state.shape);
      auto shape = WholeShapeOf(told);
      if (shape) shapes.push_back(*std::move(shape));
      asked.members.push_back({name != nullptr ? *name : names[std::get<int64_t>(owner)],
                               shape ? &shapes.back() : nullptr});
    }
    for (const std::string& stranger : of.strangers) asked.members.push_back({stranger, nullptr});
    for (const StateDict::Optimizer& other : dict_.optimizers) {
      if (&other != &of) asked.beside.push_back(other.key);
    }
    return OwnerOf(asked, model, dict_.modules);
  }

  // Parameters of other modules that the optimizer may train, too.
  std::vector<OwnableParameter> Elsewhere(const TrainableModule& model) const {
    std::vector<OwnableParameter> out;
    for (const TrainableModule& module : dict_.modules) {
      if (!MayBeTrained(model, module)) continue;
      out.insert(out.end(), module.parameters.begin(), module.parameters.end());
    }
    return out;
  }

  bool HasNumbers(size_t optimizer) const {
    return Any(optimizer, [](const StateDict::Member& member) { return member.name.empty(); });
  }

  bool Any(size_t optimizer, const auto& is_one) const {
    const auto groups = groups_.find(optimizer);
    return groups != groups_.end() && std::ranges::any_of(groups->second, [&](size_t g) {
             return std::ranges::any_of(dict_.groups[g].members, is_one);
           });
  }

  // True if the members are names of tensors, each once: then there is nothing to prove.
  bool AreAllNames(size_t optimizer) {
    std::set<std::string_view> seen;
    const bool other = Any(optimizer, [&](const StateDict::Member& member) {
      return member.number || !names_.contains(member.name) || !seen.insert(member.name).second;
    });
    if (other) return false;
    for (const size_t g : groups_[optimizer]) {
      for (const auto& member : dict_.groups[g].members) {
        out_.groups[g].push_back(names_.find(member.name)->second);
      }
    }
    out_.numbers[optimizer].emplace();
    LeaveOutParts(optimizer);
    return true;
  }

  // Those that its reader did not understand.
  void LeaveOutParts(size_t optimizer) {
    for (LeftOut one : dict_.optimizers[optimizer].left_out) {
      one.optimizer = dict_.optimizers[optimizer].label;
      LeaveOut(header_, std::move(one));
    }
  }

  void LeaveOutAll(LeftOutPart part, size_t optimizer, std::string_view why,
                   std::string_view remedy) {
    const auto& of = dict_.optimizers[optimizer];
    LeaveOut(header_, {part, of.what, StrCat(why, of.shown), std::string(remedy), 0, of.label});
  }

  // The tensors that an optimizer may have; one that it names, whatever that looks like.
  std::vector<size_t> Trainable(size_t optimizer) const {
    std::set<std::string_view> named;
    Any(optimizer, [&](const StateDict::Member& member) {
      named.insert(member.name);
      return false;
    });
    std::set<std::string_view> seconds;
    for (const auto& [second, name] : dict_.second_names) seconds.insert(second);
    const auto has = [&](std::string_view name) {
      return names_.contains(name) || seconds.contains(name);
    };
    std::vector<size_t> out;
    for (size_t i = 0; i < dict_.tensors.size(); ++i) {
      const StateDict::Tensor& tensor = dict_.tensors[i];
      const bool buffer = tensor.role
                              ? *tensor.role == Role::kBuffer
                              : LooksLikeBuffer(tensor.name, tensor.dtype, tensor.shape, has);
      if (!buffer || named.contains(tensor.name)) out.push_back(i);
    }
    return out;
  }

  // The members with all that is known of them, by group; nothing if two have one number.
  std::optional<std::vector<std::vector<OptimizerMember>>> MembersOf(size_t optimizer) {
    auto states = StatesOf(optimizer);
    std::set<int64_t> seen;
    std::vector<std::vector<OptimizerMember>> out;
    for (const size_t g : groups_[optimizer]) {
      out.emplace_back();
      for (const auto& [name, number, master] : dict_.groups[g].members) {
        if (number && !seen.insert(*number).second) return std::nullopt;
        out.back().push_back(
            {name, number ? std::move(states[*number]) : std::vector<MemberState>(), master});
      }
    }
    return out;
  }

  // `places`: of the model's parameters among the tensors.
  Status Decide(size_t optimizer, const std::vector<size_t>& places, const TrainableModule& model) {
    const auto& of = dict_.optimizers[optimizer];
    const std::vector<size_t>& groups = groups_[optimizer];
    const auto members = MembersOf(optimizer);
    if (!members) {
      LeaveOutAll(LeftOutPart::kOptimizer, optimizer, "two of its parameters have one number",
                  kAlone);
      return {};
    }
    OwnershipQuestion question{model.parameters, *members, {}, options_.parameter_order, {}, {}};
    question.second_names.insert(dict_.second_names.begin(), dict_.second_names.end());
    if (of.rule) {
      std::vector<std::string> hyper_parameters;
      for (const size_t g : groups) hyper_parameters.push_back(dict_.groups[g].hyper_parameters);
      question.rule = of.rule(hyper_parameters, model.parameters);
    }
    question.masters = of.masters;
    const std::vector<OwnableParameter> elsewhere = Elsewhere(model);
    question.elsewhere = elsewhere;
    CKPT_ASSIGN_OR_RETURN(const StateOwners owners, DecideOwners(question));
    if (!owners.why.empty()) {
      LeaveOutAll(LeftOutPart::kOptimizer, optimizer,
                  StrCat("it numbers its parameters, but ", owners.why), owners.remedy);
      return {};
    }
    bool any = groups.empty();
    Settled::Numbers numbers;
    for (size_t k = 0; k < groups.size(); ++k) {
      for (size_t i = 0; i < owners.groups[k].size(); ++i) {
        const auto& owner = owners.groups[k][i].parameter;
        const auto& [name, number, master] = dict_.groups[groups[k]].members[i];
        const auto tensor = owner ? std::optional(places[*owner]) : std::nullopt;
        if (number) numbers.emplace(*number, tensor);
        if (tensor) {
          out_.groups[groups[k]].push_back(*tensor);
          any = true;
          continue;
        }
        LeaveOut(header_, {LeftOutPart::kOptimizer, StrCat("the optimizer's '", name, "'"),
                           "the name is not that of a parameter of the model", "", 0, of.label});
      }
    }
    if (!any) return {};
    LeaveOutParts(optimizer);
    out_.numbers[optimizer] = std::move(numbers);
    return {};
  }

  const StateDict& dict_;
  const SourceOptions& options_;
  StepModel& header_;
  std::unordered_map<std::string_view, size_t> names_;
  std::unordered_map<size_t, std::vector<size_t>> groups_;  // by optimizer
  MemberOwners out_;
};

}  // namespace

Result<MemberOwners> OwnersOfMembers(const StateDict& dict, const SourceOptions& options,
                                     StepModel& header) {
  return Owners(dict, options, header).Run();
}

}  // namespace ckptfs
