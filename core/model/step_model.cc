// SPDX-License-Identifier: Apache-2.0
#include "core/model/step_model.h"

#include <algorithm>
#include <unordered_map>

#include "core/base/strings.h"
#include "core/model/box_index.h"

namespace ckptfs {

struct StepIndex {
  // The sizes that the index was built for; a model of other sizes is searched instead.
  size_t parameters = 0, atoms = 0, aliases = 0;
  uint32_t layers = 0;  // 1 + greatest layer number
  std::unordered_map<std::string, uint32_t> by_name;
  std::vector<std::vector<uint32_t>> atoms_of;        // per parameter, in atom order
  std::vector<bool> tied;                             // per parameter
  std::unordered_map<std::string, uint32_t> experts;  // group -> 1 + greatest id
};

namespace {

// Digits of the expert id in the name.
size_t ExpertDigits(const Parameter& parameter) { return std::to_string(*parameter.expert).size(); }

// The name without its expert id: what the experts of one group share.
std::string ExpertGroup(const Parameter& parameter) {
  const std::string_view name = parameter.name;
  if (!NamesItsExpert(parameter)) return parameter.name;
  return StrCat(name.substr(0, parameter.expert_at), "*",
                name.substr(parameter.expert_at + ExpertDigits(parameter)));
}

uint32_t CountLayers(const std::vector<Parameter>& parameters) {
  uint32_t layers = 0;
  for (const Parameter& parameter : parameters) {
    if (parameter.stage == StageRule::kLayer) layers = std::max(layers, parameter.layer + 1);
  }
  return layers;
}

bool Fits(const StepIndex* index, const StepModel& model) {
  return index != nullptr && index->parameters == model.parameters.size() &&
         index->atoms == model.atoms.size() && index->aliases == model.aliases.size();
}

}  // namespace

bool NamesItsExpert(const Parameter& parameter) {
  if (!parameter.expert) return true;
  const std::string_view name = parameter.name;
  const std::string id = std::to_string(*parameter.expert);
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const size_t at = parameter.expert_at;
  const size_t end = at + id.size();
  return end <= name.size() && name.substr(at, id.size()) == id &&
         (at == 0 || !digit(name[at - 1])) && (end == name.size() || !digit(name[end]));
}

std::string WithExpert(const Parameter& parameter, std::string_view shown, uint64_t id) {
  const std::string_view from_id = std::string_view(parameter.name).substr(parameter.expert_at);
  if (!shown.ends_with(from_id)) return "";
  return StrCat(shown.substr(0, shown.size() - from_id.size()), id,
                from_id.substr(ExpertDigits(parameter)));
}

void StepModel::BuildIndex() {
  auto built = std::make_shared<StepIndex>();
  built->parameters = parameters.size();
  built->atoms = atoms.size();
  built->aliases = aliases.size();
  built->layers = CountLayers(parameters);
  built->atoms_of.resize(parameters.size());
  built->tied.resize(parameters.size(), false);
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    built->by_name.emplace(parameters[i].name, i);
    if (parameters[i].expert) {
      uint32_t& count = built->experts[ExpertGroup(parameters[i])];
      count = std::max(count, *parameters[i].expert + 1);
    }
  }
  for (const Alias& alias : aliases) {
    const auto parameter_index = static_cast<uint32_t>(alias.parameter);
    if (parameter_index >= parameters.size()) continue;
    built->by_name.emplace(alias.name, parameter_index);  // a parameter's own name wins
    built->tied[parameter_index] = true;
  }
  for (uint32_t i = 0; i < atoms.size(); ++i) {
    for (Gather& gather : atoms[i].source.gathers) gather.index = BoxIndex::Of(gather.locals);
    const auto parameter_index = static_cast<uint32_t>(atoms[i].parameter);
    if (parameter_index < parameters.size()) built->atoms_of[parameter_index].push_back(i);
  }
  index = std::move(built);
}

std::optional<AtomIndex> StepModel::FindAtom(ParameterIndex parameter_index,
                                             std::string_view kind) const {
  const auto wanted = static_cast<uint32_t>(parameter_index);
  if (Fits(index.get(), *this)) {
    if (wanted >= parameters.size()) return std::nullopt;
    for (uint32_t i : index->atoms_of[wanted]) {
      if (atoms[i].kind == kind) return AtomIndex{i};
    }
    return std::nullopt;
  }
  for (uint32_t i = 0; i < atoms.size(); ++i) {
    if (atoms[i].parameter == parameter_index && atoms[i].kind == kind) return AtomIndex{i};
  }
  return std::nullopt;
}

std::optional<ParameterIndex> StepModel::FindParameter(std::string_view name) const {
  if (Fits(index.get(), *this)) {
    const auto found = index->by_name.find(std::string(name));
    if (found == index->by_name.end()) return std::nullopt;
    return ParameterIndex{found->second};
  }
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == name) return ParameterIndex{i};
  }
  for (const Alias& alias : aliases) {
    if (alias.name == name) return alias.parameter;
  }
  return std::nullopt;
}

const Document* StepModel::FindDocument(std::string_view key, std::string_view scope) const {
  for (const Document& document : documents) {
    if (document.key == key && document.scope == scope) return &document;
  }
  return nullptr;
}

bool StepModel::IsTied(ParameterIndex parameter_index) const {
  if (Fits(index.get(), *this)) {
    const auto wanted = static_cast<uint32_t>(parameter_index);
    return wanted < parameters.size() && index->tied[wanted];
  }
  return std::any_of(aliases.begin(), aliases.end(),
                     [=](const Alias& alias) { return alias.parameter == parameter_index; });
}

uint32_t StepModel::ExpertsOf(const Parameter& parameter) const {
  if (!parameter.expert) return parameter.stacked_experts;
  const std::string group = ExpertGroup(parameter);
  if (Fits(index.get(), *this)) {
    const auto found = index->experts.find(group);
    return found == index->experts.end() ? *parameter.expert + 1 : found->second;
  }
  uint32_t count = *parameter.expert + 1;
  for (const Parameter& other : parameters) {
    if (other.expert && ExpertGroup(other) == group) count = std::max(count, *other.expert + 1);
  }
  return count;
}

uint32_t StepModel::LayerCount() const {
  if (layers != 0) return layers;
  return Fits(index.get(), *this) ? index->layers : CountLayers(parameters);
}

}  // namespace ckptfs
