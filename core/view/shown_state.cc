// SPDX-License-Identifier: Apache-2.0

#include "core/view/shown_state.h"

#include <algorithm>
#include <utility>

#include "core/dialect/shown_names.h"

namespace ckptfs {
namespace {

bool IsState(const StepModel& step, const Atom& atom) {
  return atom.kind != "weight" && atom.kind != "master" && atom.kind != "grad" &&
         step.IsOfModel(atom);
}

std::optional<ShownWeight> ChooseWeight(const StepModel& step, const Layout& layout,
                                        ParameterIndex parameter) {
  const auto weight = step.FindAtom(parameter, "weight");
  const auto master = step.FindAtom(parameter, "master");
  if (!weight && !master) return std::nullopt;
  const Atom& stored = step.atom(weight ? *weight : *master);
  DType dtype = stored.dtype;
  if (!weight && step.model_dtype) dtype = *step.model_dtype;
  const bool castable = IsFloat(stored.dtype) && step.parameter(parameter).role != Role::kBuffer;
  if (layout.dtype && castable) dtype = *layout.dtype;
  if (weight && (dtype == stored.dtype || !master)) {
    return ShownWeight{*weight, dtype, stored.derived || dtype != stored.dtype};
  }
  return ShownWeight{*master, dtype, true};
}

}  // namespace

std::shared_ptr<const ShownState> ShownState::Of(std::shared_ptr<const StepModel> step,
                                                 const Layout& layout) {
  return std::shared_ptr<const ShownState>(new ShownState(std::move(step), layout));
}

ShownState::ShownState(std::shared_ptr<const StepModel> step, const Layout& layout)
    : step_(std::move(step)), layout_(layout) {
  SetNames();
  weights_.reserve(step_->parameters.size());
  for (uint32_t i = 0; i < step_->parameters.size(); ++i) {
    weights_.push_back(ChooseWeight(*step_, layout_, ParameterIndex{i}));
  }
  SetAtoms();
  SetGroups();
}

void ShownState::SetNames() {
  auto names = NamesFor(*step_, layout_);
  if (!names) {
    nameless_ = std::move(names).error();
    return;
  }
  names_ = std::move(names->parameters);
  for (size_t i = 0; i < step_->aliases.size(); ++i) {
    std::string& name = names->aliases[i];
    if (!name.empty()) aliases_.push_back({std::move(name), step_->aliases[i].parameter});
  }
}

void ShownState::SetAtoms() {
  const StepModel& step = *step_;
  begin_.assign(step.parameters.size() + 1, 0);
  for (const Atom& atom : step.atoms) ++begin_[static_cast<uint32_t>(atom.parameter) + 1];
  for (size_t p = 1; p < begin_.size(); ++p) begin_[p] += begin_[p - 1];
  std::vector<uint32_t> next = begin_;
  atoms_.resize(step.atoms.size());
  for (uint32_t a = 0; a < step.atoms.size(); ++a) {
    const bool state = IsState(step, step.atoms[a]);
    if (state) states_.push_back(AtomIndex{a});
    atoms_[next[static_cast<uint32_t>(step.atoms[a].parameter)]++] = {AtomIndex{a}, state, true};
  }
  const auto kind = [&](const ShownAtom& atom) -> const std::string& {
    return step.atom(atom.atom).kind;
  };
  for (size_t p = 0; p + 1 < begin_.size(); ++p) {
    const auto mine = std::span(atoms_).subspan(begin_[p], begin_[p + 1] - begin_[p]);
    std::ranges::stable_sort(mine, {}, kind);
    for (size_t i = 1; i < mine.size(); ++i) mine[i].first = kind(mine[i]) != kind(mine[i - 1]);
  }
}

void ShownState::SetGroups() {
  const StepModel& step = *step_;
  std::vector<bool> grouped(step.parameters.size(), false);
  for (const Group& group : step.groups) {
    std::vector<ParameterIndex> members;
    for (const ParameterIndex p : group.parameters) {
      grouped[static_cast<uint32_t>(p)] = true;
      if (step.parameter(p).role == Role::kTrainable) members.push_back(p);
    }
    AddGroup(&group, std::move(members));
  }
  std::vector<ParameterIndex> rest;
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    if (step.parameters[i].role != Role::kTrainable || grouped[i]) continue;
    if (step.groups.empty() || !StatesOf(ParameterIndex{i}).empty()) {
      rest.push_back(ParameterIndex{i});
    }
  }
  if (!rest.empty()) AddGroup(nullptr, std::move(rest));
}

void ShownState::AddGroup(const Group* recorded, std::vector<ParameterIndex> members) {
  ShownGroup group{recorded, std::move(members), {}};
  for (const ParameterIndex p : group.members) group.kinds.merge(StatesOf(p));
  groups_.push_back(std::move(group));
}

Status ShownState::CheckNames() const { return nameless_ ? Status(Fail(*nameless_)) : Status(); }

const std::string& ShownState::NameOf(ParameterIndex parameter) const {
  return names_[static_cast<uint32_t>(parameter)];
}

const std::optional<ShownWeight>& ShownState::FindWeight(ParameterIndex parameter) const {
  return weights_[static_cast<uint32_t>(parameter)];
}

Result<ShownWeight> ShownState::WeightOf(ParameterIndex parameter) const {
  if (const auto& weight = FindWeight(parameter)) return *weight;
  return Fail(Error{ErrorCode::kUnsupported, "neither a weight nor a master"}.OfParameter(
      NameOf(parameter)));
}

std::span<const ShownAtom> ShownState::AtomsOf(ParameterIndex parameter) const {
  const auto p = static_cast<uint32_t>(parameter);
  return std::span(atoms_).subspan(begin_[p], begin_[p + 1] - begin_[p]);
}

StatesByKind ShownState::StatesOf(ParameterIndex parameter) const {
  StatesByKind states;
  for (const ShownAtom& atom : AtomsOf(parameter)) {
    if (atom.state && atom.first) states.emplace(step_->atom(atom.atom).kind, atom.atom);
  }
  return states;
}

uint64_t ShownState::MemoryBytes() const {
  constexpr uint64_t kMapNode = 4 * sizeof(void*) + sizeof(StatesByKind::value_type);
  uint64_t bytes = sizeof(*this) + begin_.size() * sizeof(uint32_t) +
                   weights_.size() * sizeof(weights_[0]) + atoms_.size() * sizeof(ShownAtom) +
                   states_.capacity() * sizeof(AtomIndex);
  for (const std::string& name : names_) bytes += sizeof(name) + name.capacity();
  for (const Alias& alias : aliases_) bytes += sizeof(alias) + alias.name.capacity();
  for (const ShownGroup& group : groups_) {
    bytes += sizeof(group) + group.members.capacity() * sizeof(ParameterIndex) +
             group.kinds.size() * kMapNode;
  }
  return bytes;
}

}  // namespace ckptfs
