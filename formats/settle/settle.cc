// SPDX-License-Identifier: Apache-2.0

#include "formats/settle/settle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/state/roles.h"
#include "core/state/state_fit.h"
#include "formats/settle/member_owners.h"
#include "formats/sharding/placer.h"
#include "formats/sharding/sharding.h"

namespace ckptfs {
namespace {

using Unplaced = StateDict::Unplaced;

std::optional<uint64_t> WholeNumber(const ScalarValue& value) {
  double number = -1;
  if (value.dtype == DType::kF32) {
    float single;
    std::memcpy(&single, value.bytes.data(), sizeof(single));
    number = static_cast<double>(single);
  } else if (value.dtype == DType::kF64) {
    std::memcpy(&number, value.bytes.data(), sizeof(number));
  } else if (value.dtype == DType::kI64) {
    int64_t integer;
    std::memcpy(&integer, value.bytes.data(), sizeof(integer));
    number = static_cast<double>(integer);
  }
  const bool whole = number >= 0 && number < 1e15 && number == std::floor(number);
  return whole ? std::optional(static_cast<uint64_t>(number)) : std::nullopt;
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
    AddGroups();
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
    std::vector<NamedLocals> locals;
    locals.reserve(dict_.tensors.size());
    for (const auto& tensor : dict_.tensors) {
      locals.emplace_back(tensor.name, std::vector<Shape>{tensor.shape});
    }
    CKPT_ASSIGN_OR_RETURN(const ShardingRules rules,
                          ShardingRules::Make(nullptr, options_, std::move(locals), dict_.sizes));
    CKPT_ASSIGN_OR_RETURN(MemberOwners owners, OwnersOfMembers(dict_, options_, header_));
    out_.numbers = std::move(owners.numbers);
    members_ = std::move(owners.groups);
    of_others_ = std::move(owners.of_others);
    const std::vector<Trained> trained = WhatIsTrained();
    std::map<DType, uint64_t> elements;
    for (size_t i = 0; i < dict_.tensors.size(); ++i) {
      const StateDict::Tensor& tensor = dict_.tensors[i];
      CKPT_RETURN_IF_ERROR(DeclareTensor(i, trained[i], rules));
      CKPT_ASSIGN_OR_RETURN(const uint64_t count, ElementCount(tensor.shape));
      if (IsFloat(tensor.dtype)) elements[tensor.dtype] += count;
    }
    rules.Describe(header_);
    header_.model_dtype = MostCommon(elements, std::nullopt);
    return {};
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

  Status DeclareTensor(size_t i, Trained trained, const ShardingRules& rules) {
    const StateDict::Tensor& tensor = dict_.tensors[i];
    const auto has = [&](std::string_view name) {
      return names_.contains(name) || second_names_.contains(name);
    };
    const Role role =
        tensor.role ? *tensor.role : RoleOf(tensor.name, tensor.dtype, tensor.shape, trained, has);
    CKPT_ASSIGN_OR_RETURN(auto sharding,
                          rules.Resolve(tensor.name, {&tensor.shape, 1}, role == Role::kBuffer));
    if (tensor.packed && sharding->pattern.kind == PatternKind::kShard) {
      sharding->pattern = Pattern{};
    }
    CKPT_ASSIGN_OR_RETURN(const ParameterIndex index,
                          assembler_.AddParameter(ParameterOf(tensor.name, role, *sharding)));
    CKPT_CHECK(static_cast<size_t>(index) == i);
    CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                          assembler_.AddAtom(index, "", "weight", tensor.dtype, tensor.shape));
    CKPT_RETURN_IF_ERROR(tensor.place(assembler_, atom));
    const auto [begin, end] = seconds_.equal_range(tensor.name);
    for (auto it = begin; it != end; ++it) assembler_.AddAlias(std::string(it->second), index);
    return {};
  }

  // ---- states -------------------------------------------------------------------------

  // The masters of the members up to one, or of all: each stands before its member's states.
  Status AddMasters(std::optional<size_t> last) {
    bool reached = false;
    while (next_master_ < masters_.size() && !reached) {
      const auto [label, i] = masters_[next_master_++];
      const StateDict::Tensor& tensor = dict_.tensors[i];
      CKPT_ASSIGN_OR_RETURN(const AtomIndex atom,
                            assembler_.AddAtom(ParameterIndex{static_cast<uint32_t>(i)}, label,
                                               "master", tensor.dtype, tensor.shape));
      CKPT_RETURN_IF_ERROR(tensor.place(assembler_, atom));
      reached = last == i;
    }
    last_master_ = last;
    return {};
  }

  Status AddStates() {
    for (size_t g = 0; g < dict_.groups.size(); ++g) {
      const StateDict::Optimizer& optimizer = dict_.optimizers[dict_.groups[g].optimizer];
      if (!optimizer.on_weights) continue;
      for (const size_t i : members_[g]) masters_.emplace_back(optimizer.label, i);
    }
    for (const StateDict::State& state : dict_.states) CKPT_RETURN_IF_ERROR(AddState(state));
    return AddMasters(std::nullopt);
  }

  Status AddState(const StateDict::State& state) {
    const auto owner = OwnerOf(state);
    if (!owner) {  // told with its optimizer, but for one of a number that no member has
      if (!IsMembers(state)) LeaveOutUnnumbered(state);
      return {};
    }
    if (owner != last_master_) CKPT_RETURN_IF_ERROR(AddMasters(owner));
    const StateDict::Tensor& of = dict_.tensors[*owner];
    if (dict_.kinds == StateDict::Kinds::kOptimizers) {
      if (!known_.emplace(state.optimizer, *owner, state.kind).second) {
        return LeaveOutState(state, of, Unplaced::kTwice);
      }
      if (IsOurs(state.kind)) return LeaveOutState(state, of, Unplaced::kNameOfOurs);
    }
    // A document may show any state; who leaves it out asks whether its kind may have the shape.
    const bool strict = dict_.unfit == StateDict::Unfit::kLeftOut;
    const auto fit = state.shape ? FitOf(strict ? state.kind : "", *state.shape, of.shape)
                                 : std::optional<Relation>();
    const bool number =
        !state.place || fit == Relation::kScalar || (state.kind == "step" && state.shape->empty());
    if (state.scalar && number) return AddScalar(state, *owner);
    if (!state.place) return LeaveOutState(state, of, Unplaced::kOpaque);
    if (!fit && strict) return LeaveOutState(state, of, Unplaced::kUnfit);
    CKPT_ASSIGN_OR_RETURN(
        const AtomIndex atom,
        assembler_.AddAtom(ParameterIndex{static_cast<uint32_t>(*owner)},
                           dict_.optimizers[state.optimizer].label, state.kind, state.dtype,
                           *state.shape, fit.value_or(Relation::kOpaque)));
    return state.place(assembler_, atom);
  }

  Status AddScalar(const StateDict::State& state, size_t owner) {
    CKPT_ASSIGN_OR_RETURN(const auto value, state.scalar());
    if (!value) return LeaveOutState(state, dict_.tensors[owner], Unplaced::kOpaque);
    if (state.kind == "step") {
      if (const auto steps = WholeNumber(*value)) {
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
                       ""});
  }

  // The reason names the kind and not the parameter, so that a kind is one line for all parameters.
  Status LeaveOutState(const StateDict::State& state, const StateDict::Tensor& of, Unplaced how) {
    StateDict::Fate fate;
    if (dict_.keep) fate = dict_.keep(state, of.name, how);
    if (!fate.said) return {};
    std::string what = StrCat("optimizer state '", state.kind, "' of '", of.name, "'");
    std::string_view why = "is neither a plain tensor nor a number";
    if (how == Unplaced::kTwice) why = "is there twice";
    if (how == Unplaced::kNameOfOurs) why = "has a name that ckptfs uses for something else";
    if (how == Unplaced::kUnfit) {
      why = "has a shape that does not follow from that of its parameter";
      what += StrCat(" (", ShapeToString(*state.shape), ", the parameter ", ShapeToString(of.shape),
                     ")");
    }
    if (fate.why.empty()) fate.why = StrCat("state '", state.kind, "' ", why);
    if (fate.kept) fate.why += " (dcp/ alone shows it, as it was)";
    LeaveOut(header_, {LeftOutPart::kOptimizer, std::move(what), std::move(fate.why), ""});
    return {};
  }

  void AddGroups() {
    for (size_t g = 0; g < dict_.groups.size(); ++g) {
      const StateDict::Group& group = dict_.groups[g];
      if (group.hyper_parameters.empty() || !out_.numbers[group.optimizer]) continue;
      Group added{dict_.optimizers[group.optimizer].label, {}, group.hyper_parameters};
      for (const size_t i : members_[g]) {
        added.parameters.push_back(ParameterIndex{static_cast<uint32_t>(i)});
      }
      assembler_.AddGroup(std::move(added));
    }
  }

  const StateDict& dict_;
  const SourceOptions& options_;
  Assembler& assembler_;
  StepModel& header_;
  Settled out_;
  std::vector<std::vector<size_t>> members_;                  // by group: tensors
  std::vector<std::pair<std::string_view, size_t>> masters_;  // label and tensor, in members' order
  size_t next_master_ = 0;
  std::optional<size_t> last_master_;
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
  return [&held](Assembler& assembler, AtomIndex atom) -> Status {
    assembler.AddFragment(atom, 0, assembler.AddLocal(atom, 0, held.local), held.fragment);
    return {};
  };
}

PlaceParts PlaceTensor(const FileTensor& tensor) {
  return [&tensor](Assembler& assembler, AtomIndex atom) -> Status {
    CKPT_ASSIGN_OR_RETURN(FileTensor::Held held, tensor.As(WholeTensor(tensor.shape())));
    return PlaceHeld(held)(assembler, atom);
  };
}

}  // namespace ckptfs
