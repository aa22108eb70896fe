// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/settle.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/model/step_counts.h"
#include "core/state/roles.h"
#include "core/state/state_fit.h"
#include "formats/settle/member_owners.h"
#include "formats/settle/tensor_shardings.h"
#include "formats/settle/united_groups.h"

namespace ckptfs {
namespace {

using Unplaced = StateDict::Unplaced;

Parameter ParameterOf(const StateDict::Tensor& tensor, Role role, const Sharding& sharding) {
  Parameter parameter;
  parameter.name = tensor.name;
  parameter.shape = sharding.shape;
  parameter.role = role;
  parameter.pattern = sharding.pattern;
  parameter.source_pattern = sharding.source_pattern;
  parameter.source_stages = tensor.stages;
  parameter.stage = sharding.stage;
  parameter.layer = sharding.layer.value_or(0);
  parameter.expert = sharding.expert;
  parameter.expert_at = sharding.expert_at;
  parameter.stacked_experts = sharding.stacked_experts;
  return parameter;
}

class Settler {
 public:
  Settler(const StateDict& dict, const SourceOptions& options, Assembler& assembler)
      : dict_(dict), options_(options), assembler_(assembler), header_(assembler.header()) {}

  Result<Settled> Run() {
    for (size_t i = 0; i < dict_.tensors.size(); ++i) {
      const std::string& name = dict_.tensors[i].name;
      if (!names_.emplace(name, i).second) return Refuse("'", name, "' is the name of two tensors");
    }
    for (const auto& [second, name] : dict_.second_names) seconds_.emplace(name, second);
    for (const auto& [second, name] : dict_.second_names) second_names_.insert(second);
    CKPT_RETURN_IF_ERROR(Declare());
    CKPT_RETURN_IF_ERROR(AddStates());
    CKPT_RETURN_IF_ERROR(DeriveWeights());
    CKPT_RETURN_IF_ERROR(AddGroups());
    return std::move(out_);
  }

 private:
  std::optional<size_t> Find(std::string_view name) const {
    const auto found = names_.find(name);
    return found == names_.end() ? std::nullopt : std::optional(found->second);
  }

  // The parameter that a state is of, if it is of one.
  std::optional<size_t> OwnerOf(const StateDict::State& state) const {
    if (of_others_.contains(state.optimizer)) return std::nullopt;
    if (const auto* name = std::get_if<std::string>(&state.owner)) return Find(*name);
    const auto& numbers = out_.numbers[state.optimizer];
    if (!numbers) return std::nullopt;
    const auto found = numbers->find(std::get<int64_t>(state.owner));
    return found == numbers->end() ? std::nullopt : found->second;
  }

  // False if a state has a number that no member has.
  bool IsMembers(const StateDict::State& state) const {
    const auto* number = std::get_if<int64_t>(&state.owner);
    const auto& numbers = out_.numbers[state.optimizer];
    return number == nullptr || !numbers || numbers->contains(*number);
  }

  // ---- parameters ---------------------------------------------------------------------

  Status Declare() {
    CKPT_ASSIGN_OR_RETURN(MemberOwners owners, OwnersOfMembers(dict_, options_, header_));
    out_.numbers = std::move(owners.numbers);
    members_ = std::move(owners.groups);
    of_others_ = std::move(owners.of_others);
    const std::vector<Role> roles = Roles();
    CKPT_ASSIGN_OR_RETURN(shardings_, ShardingsOf(dict_, roles, options_, header_));
    std::map<DType, uint64_t> elements;
    for (size_t i = 0; i < dict_.tensors.size(); ++i) {
      const StateDict::Tensor& tensor = dict_.tensors[i];
      CKPT_RETURN_IF_ERROR(DeclareTensor(i, roles[i]));
      CKPT_ASSIGN_OR_RETURN(const uint64_t count, ElementCount(tensor.shape));
      if (IsFloat(tensor.dtype)) elements[tensor.dtype] += count;
    }
    const bool all_stored =
        std::ranges::all_of(dict_.tensors, [](const auto& tensor) { return bool{tensor.place}; });
    header_.model_dtype = dict_.model_dtype;
    if (!dict_.model_dtype && all_stored) header_.model_dtype = MostCommon(elements, std::nullopt);
    return {};
  }

  std::vector<Role> Roles() const {
    const std::vector<Trained> trained = WhatIsTrained();
    const auto has = [&](std::string_view name) {
      return names_.contains(name) || second_names_.contains(name);
    };
    std::vector<Role> out;
    for (size_t i = 0; i < dict_.tensors.size(); ++i) {
      const StateDict::Tensor& of = dict_.tensors[i];
      out.push_back(of.role ? *of.role : RoleOf(of.name, of.dtype, of.shape, trained[i], has));
    }
    return out;
  }

  std::vector<Trained> WhatIsTrained() const {
    bool unknown = dict_.other_optimizers;
    std::set<size_t> trained;
    for (const auto& numbers : out_.numbers) unknown = unknown || !numbers;
    for (const auto& group : members_) trained.insert(group.begin(), group.end());
    for (const auto& state : dict_.states) {
      if (const auto owner = OwnerOf(state)) trained.insert(*owner);
      unknown = unknown || !IsMembers(state);
    }
    unknown = unknown || trained.empty();
    std::vector<Trained> out(dict_.tensors.size(), unknown ? Trained::kUnknown : Trained::kNo);
    for (const size_t i : trained) out[i] = Trained::kYes;
    return out;
  }

  Status DeclareTensor(size_t i, Role role) {
    const StateDict::Tensor& tensor = dict_.tensors[i];
    const Sharding& sharding = shardings_[i];
    CKPT_ASSIGN_OR_RETURN(const ParameterIndex index,
                          assembler_.AddParameter(ParameterOf(tensor, role, sharding)));
    CKPT_CHECK(static_cast<size_t>(index) == i);
    if (tensor.place) {
      CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                            assembler_.AddAtom(index, "", "weight", tensor.dtype, sharding.shape));
      CKPT_RETURN_IF_ERROR(Place(tensor.place, atom, sharding));
    }
    const auto [begin, end] = seconds_.equal_range(tensor.name);
    for (auto it = begin; it != end; ++it) assembler_.AddAlias(std::string(it->second), index);
    return {};
  }

  Status Place(const PlaceParts& place, AtomIndex atom, const Spread& spread) {
    AtomParts parts(assembler_, atom, spread, locals_);
    return place(assembler_, parts);
  }

  // ---- states -------------------------------------------------------------------------

  Status AddStates() {
    for (const StateDict::State& state : dict_.states) CKPT_RETURN_IF_ERROR(AddState(state));
    for (size_t g = 0; g < dict_.groups.size(); ++g) {
      for (const size_t i : members_[g]) {
        CKPT_RETURN_IF_ERROR(AddMaster(dict_.groups[g].optimizer, i));
      }
    }
    return {};
  }

  // The weight as its master, once, where the optimizer has it so.
  Status AddMaster(size_t optimizer, size_t i) {
    const auto& of = dict_.optimizers[optimizer];
    if (!of.on_weights || !on_weights_.emplace(optimizer, i).second) return {};
    const StateDict::Tensor& tensor = dict_.tensors[i];
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler_.AddAtom(ParameterIndex{static_cast<uint32_t>(i)}, of.label,
                                             "master", tensor.dtype, shardings_[i].shape));
    return Place(tensor.place, atom, shardings_[i]);
  }

  Status AddState(const StateDict::State& state) {
    const auto owner = OwnerOf(state);
    if (!owner) {  // told with its optimizer, but for one of a number that no member has
      if (!IsMembers(state)) LeaveOutUnnumbered(state);
      return {};
    }
    CKPT_RETURN_IF_ERROR(AddMaster(state.optimizer, *owner));  // before its states
    const StateDict::Tensor& of = dict_.tensors[*owner];
    if (state.kinds == StateDict::Kinds::kOptimizers) {
      if (!known_.emplace(state.optimizer, *owner, state.kind).second) {
        return LeaveOutState(state, of, Unplaced::kTwice);
      }
      if (IsOurs(state.kind)) return LeaveOutState(state, of, Unplaced::kNameOfOurs);
    }
    // A document may show any state; who leaves it out asks whether its kind may have the shape.
    const bool strict = dict_.unfit == StateDict::Unfit::kLeftOut;
    std::optional<Relation> fit = state.relation;
    if (!fit && state.shape) fit = FitOf(strict ? state.kind : "", *state.shape, HeldBy(of, state));
    const bool number =
        !state.place || fit == Relation::kScalar || (state.kind == "step" && state.shape->empty());
    if (state.scalar && number) return AddScalar(state, *owner);
    if (!state.place) return LeaveOutState(state, of, Unplaced::kOpaque);
    if (!fit && strict) return LeaveOutState(state, of, Unplaced::kUnfit);
    return AddTensor(state, *owner, fit.value_or(Relation::kOpaque));
  }

  // The shape of the part of a tensor that the state is of.
  static const Shape& HeldBy(const StateDict::Tensor& of, const StateDict::State& state) {
    return of.ranks.empty() ? of.shape : of.ranks[state.rank];
  }

  Status AddTensor(const StateDict::State& state, size_t owner, Relation relation) {
    const bool same = relation == Relation::kSame;
    const StateDict::Tensor& of = dict_.tensors[owner];
    if (!same && of.ranks.size() > 1) return LeaveOutState(state, of, Unplaced::kOfPart);
    CKPT_ASSIGN_OR_RETURN(
        const AtomIndex atom,
        assembler_.AddAtom(ParameterIndex{static_cast<uint32_t>(owner)},
                           dict_.optimizers[state.optimizer].label, state.kind, state.dtype,
                           same ? shardings_[owner].shape : *state.shape, relation));
    if (!same) return Place(state.place, atom, {{}, {WholeTensor(*state.shape)}, {}});
    if (state.kind == "master") master_of_.emplace(owner, atom);
    return Place(state.place, atom, shardings_[owner]);
  }

  Status AddScalar(const StateDict::State& state, size_t owner) {
    CKPT_ASSIGN_OR_RETURN(const auto value, state.scalar());
    if (!value) return LeaveOutState(state, dict_.tensors[owner], Unplaced::kOpaque);
    if (state.kind == "step") {
      if (const auto steps = CountOf(value->dtype, value->bytes)) {
        out_.steps = std::max(out_.steps.value_or(0), *steps);
      }
    }
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler_.AddAtom(ParameterIndex{static_cast<uint32_t>(owner)},
                                             dict_.optimizers[state.optimizer].label, state.kind,
                                             value->dtype, value->shape, Relation::kScalar));
    return assembler_.SetInline(atom, value->bytes, value->python_number);
  }

  void LeaveOutUnnumbered(const StateDict::State& state) {
    LeaveOut(header_, {LeftOutPart::kOptimizer,
                       StrCat("optimizer state '", state.kind, "' of parameter ",
                              std::get<int64_t>(state.owner)),
                       StrCat("the optimizer's groups do not have a parameter of this number",
                              dict_.optimizers[state.optimizer].shown),
                       "", 0, dict_.optimizers[state.optimizer].label});
  }

  // The reason names the kind and not the parameter, so that a kind is one line for all parameters.
  Status LeaveOutState(const StateDict::State& state, const StateDict::Tensor& of, Unplaced how) {
    StateDict::Fate fate;
    if (dict_.keep) fate = dict_.keep(state, of.name, how);
    if (!fate.said || state.none) return {};
    std::string what = StrCat("optimizer state '", state.kind, "' of '", of.name, "'");
    std::string_view why = "is neither a plain tensor nor a number";
    if (how == Unplaced::kOfPart) {
      why = "has a shape of its own, but tensor-parallel ranks hold parts of it";
    }
    if (how == Unplaced::kTwice) why = "is there twice";
    if (how == Unplaced::kNameOfOurs) why = "has a name that ckptfs uses for something else";
    if (how == Unplaced::kUnfit) {
      why = "has a shape that does not follow from that of its parameter";
      what += StrCat(" (", ShapeToString(*state.shape), ", the parameter ",
                     ShapeToString(HeldBy(of, state)), ")");
    }
    if (fate.why.empty()) fate.why = StrCat("state '", state.kind, "' ", why);
    if (fate.kept) fate.why += " (dcp/ alone shows it, as it was)";
    LeaveOut(header_, {LeftOutPart::kOptimizer, std::move(what), std::move(fate.why), "", 0,
                       dict_.optimizers[state.optimizer].label});
    return {};
  }

  Status DeriveWeights() {
    for (size_t i = 0; i < dict_.tensors.size() && dict_.model_dtype; ++i) {
      const ParameterIndex index{static_cast<uint32_t>(i)};
      const bool missing = !dict_.tensors[i].place;
      if (!missing || assembler_.parameter(index).role != Role::kTrainable) continue;
      const auto master = master_of_.find(i);
      if (master == master_of_.end()) {
        return Fail(Error{ErrorCode::kInvalid, "no file has its weight or its master"}.OfParameter(
            dict_.tensors[i].name));
      }
      CKPT_ASSIGN_OR_RETURN(
          const AtomIndex weight,
          assembler_.AddAtom(index, "", "weight", *dict_.model_dtype, shardings_[i].shape));
      CKPT_RETURN_IF_ERROR(assembler_.SetCast(weight, master->second));
      ++out_.derived;
    }
    return {};
  }

  // dcp/ shows the tensors again among the hyper-parameters of the group that is added next.
  void KeepTensors(const StateDict::Group& group, const std::string& label) {
    if (group.tensors.empty()) return;
    if (!header_.facts.keys) header_.facts.keys.emplace();
    KeyShape& keys = *header_.facts.keys;
    const std::string& optimizer = keys.OptimizerKey(label);
    const auto number =
        static_cast<uint32_t>(std::ranges::count_if(header_.groups, [&](const Group& one) {
          return keys.OptimizerKey(one.optimizer) == optimizer;
        }));
    for (const auto& [key, tensor] : group.tensors) {
      const auto path = Below(optimizer, {{"param_groups", {}}, {"", number}, {key, {}}});
      keys.tensors.emplace(KeyOf(path), tensor);
    }
  }

  Status AddGroups() {
    std::map<std::string_view, UnitedGroups> united;  // by the optimizers' label
    for (size_t g = 0; g < dict_.groups.size(); ++g) {
      const StateDict::Group& group = dict_.groups[g];
      const std::string& label = dict_.optimizers[group.optimizer].label;
      const bool alone = !group.number;
      if ((alone && group.hyper_parameters.empty()) || !out_.numbers[group.optimizer]) continue;
      Group added{label, {}, group.hyper_parameters};
      for (const size_t i : members_[g]) {
        added.parameters.push_back(ParameterIndex{static_cast<uint32_t>(i)});
      }
      if (alone) {
        KeepTensors(group, label);
        assembler_.AddGroup(std::move(added));
        continue;
      }
      UnitedGroups& groups = united.try_emplace(label, assembler_).first->second;
      CKPT_RETURN_IF_ERROR(groups.Add(*group.number, group.hyper_parameters, added.parameters));
    }
    for (auto& [label, groups] : united) std::move(groups).Finish(label);
    return {};
  }

  const StateDict& dict_;
  const SourceOptions& options_;
  Assembler& assembler_;
  StepModel& header_;
  Settled out_;
  std::vector<Sharding> shardings_;  // by tensor
  AtomParts::Locals locals_;
  std::unordered_map<size_t, AtomIndex> master_of_;            // by tensor
  std::vector<std::vector<size_t>> members_;                   // by group: tensors
  std::set<std::pair<size_t, size_t>> on_weights_;             // optimizer, tensor
  std::set<size_t> of_others_;                                 // optimizers
  std::unordered_map<std::string_view, size_t> names_;         // of tensors
  std::multimap<std::string_view, std::string_view> seconds_;  // name, second name
  std::set<std::string_view> second_names_;
  // Optimizer, tensor and kind of the states so far.
  std::set<std::tuple<size_t, size_t, std::string_view>> known_;
};

}  // namespace

Result<Settled> Settle(const StateDict& dict, const SourceOptions& options, Assembler& assembler) {
  return Settler(dict, options, assembler).Run();
}

PlaceParts PlaceHeld(const FileTensor::Held& held) {
  return [&held](Assembler& assembler, AtomParts& atom) -> Status {
    assembler.AddFragment(atom, 0, assembler.AddLocal(atom, 0, held.local), held.fragment);
    return {};
  };
}

PlaceParts PlaceTensor(const FileTensor& tensor, Holder holder) {
  return [&tensor, holder](Assembler& assembler, AtomParts& parts) -> Status {
    auto held = tensor.As(parts.LocalOf(holder.tp));
    if (!held) {
      const StepModel& step = assembler.header();
      const Atom& atom = step.atom(parts);
      return Fail(std::move(held).error().WithContext(StrCat(step.blob(tensor.blob()).path, ": '",
                                                             step.parameter(atom.parameter).name,
                                                             "' (", atom.kind, ")")));
    }
    CKPT_ASSIGN_OR_RETURN(const auto local, parts.Add(holder, std::move(held->local)));
    parts.AddFragment(local, held->fragment);
    return {};
  };
}

std::optional<DType> MostCommon(const std::map<DType, uint64_t>& counts,
                                std::optional<DType> otherwise) {
  uint64_t most = 0;
  for (const auto& [dtype, count] : counts) {
    if (count > most) otherwise = dtype;
    most = std::max(most, count);
  }
  return otherwise;
}

}  // namespace ckptfs
