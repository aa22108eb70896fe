// SPDX-License-Identifier: Apache-2.0
//
// Names of stage 0, where the optimizer lies in the model states file.

#include <algorithm>
#include <set>
#include <span>

#include "core/base/strings.h"
#include "formats/deepspeed/native/named.h"
#include "formats/deepspeed/state_names.h"

namespace ckptfs::deepspeed::native {
namespace {

using Form = UnshardedOptimizer::Form;
using GroupNames = std::vector<std::vector<std::string>>;

// The shape that a member's states have, if it has any of its own.
std::optional<Shape> ShapeOfState(const UnshardedOptimizer& optimizer, size_t group, size_t i) {
  if (optimizer.form == Form::kUnfused) {
    if (i < optimizer.parameter_masters[group].size()) {
      return optimizer.parameter_masters[group][i].shape();
    }
    return std::nullopt;
  }
  const auto state = optimizer.states.find(optimizer.groups[group].members[i]);
  if (state == optimizer.states.end()) return std::nullopt;
  for (const NamedTensor& entry : state->second.flat) {
    if (entry.name == "exp_avg" || entry.name == "exp_avg_sq" || entry.name == "momentum_buffer") {
      return entry.tensor.shape();
    }
  }
  return std::nullopt;
}

// FP16_Optimizer makes a group's weights views of one storage: each storage
// that parameters tile without a gap, and their names in its order.
std::map<uint64_t, GroupNames> TiledStorages(const ModelStates& model,
                                             const StateDictNames& spellings) {
  std::map<std::string, std::map<uint64_t, const NamedTensor*>> storages;
  for (const NamedTensor& entry : model.module) {
    if (entry.tensor.elements() > 0 && entry.tensor.dense()) {
      storages[entry.tensor.storage_key()].try_emplace(entry.tensor.storage_offset(), &entry);
    }
  }
  std::map<uint64_t, GroupNames> out;  // by elements
  for (const auto& [key, tensors] : storages) {
    uint64_t at = 0;
    std::vector<std::string> names;
    for (const auto& [offset, entry] : tensors) {
      if (offset != at) break;
      at += entry->tensor.elements();
      names.push_back(spellings.Of(entry->name));
    }
    if (names.size() == tensors.size() &&
        at == tensors.begin()->second->tensor.storage_elements()) {
      out[at].push_back(std::move(names));
    }
  }
  return out;
}

Result<GroupNames> NamesOfFused(const ModelStates& model, const UnshardedOptimizer& optimizer,
                                const StateDictNames& spellings) {
  const std::map<uint64_t, GroupNames> storages = TiledStorages(model, spellings);
  GroupNames out;
  std::set<uint64_t> used;
  for (const FileTensor& master : optimizer.flat_masters) {
    const auto found = storages.find(master.elements());
    const bool clear = found != storages.end() && found->second.size() == 1 &&
                       used.insert(master.elements()).second;
    if (!clear) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(model.file, ": no single storage of the module's weights has the ",
                         master.elements(),
                         " elements of a flat fp32 group; its parameters cannot be told apart"));
    }
    out.push_back(found->second.front());
  }
  return out;
}

// What an optimizer could have: the module without buffers and second names.
std::vector<NamedShape> Candidates(const ModelStates& model, const StateDictNames& spellings,
                                   const Named& named) {
  std::vector<NamedShape> out;
  std::set<std::string> seen = BufferNames(model);
  for (const NamedTensor& entry : model.module) {
    const std::string name = spellings.Of(entry.name);
    if (named.aliases.contains(name) || !seen.insert(name).second) continue;
    out.push_back(NamedShape{name, entry.tensor.shape()});
  }
  return out;
}

Result<GroupNames> NamesOfGroups(const ModelStates& model, const StateDictNames& spellings,
                                 std::span<const NamedShape> candidates) {
  const UnshardedOptimizer& optimizer = *model.optimizer;
  if (optimizer.form == Form::kFused) return NamesOfFused(model, optimizer, spellings);
  const GroupNames& given = optimizer.names;
  std::vector<std::vector<std::optional<Shape>>> shapes;
  bool named = true;
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    const size_t members = optimizer.groups[g].members.size();
    named = named && g < given.size() && given[g].size() == members;
    shapes.emplace_back();
    for (size_t i = 0; i < members; ++i) shapes.back().push_back(ShapeOfState(optimizer, g, i));
  }
  if (named && !optimizer.groups.empty()) return given;
  auto matched = MatchStates(candidates, shapes);
  if (!matched) return Fail(std::move(matched).error().WithContext(model.file));
  return matched;
}

// Adds the groups of one rank.
Status AddGroups(const Parsed& parsed, uint32_t mp, const GroupNames& groups, Named& out) {
  std::set<ParameterIndex> stored;
  for (const NamedWeight& weight : out.weights) {
    if (weight.tp == mp % parsed.tp) stored.insert(weight.parameter);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    NamedGroup group{mp, g, std::nullopt, {}};
    for (const std::string& name : groups[g]) {
      const auto index = out.Find(name);
      const bool held = index && stored.contains(*index) &&
                        out[*index].ShapeOn(mp / parsed.tp, mp % parsed.tp) != nullptr;
      if (!held) {
        return Refuse(parsed.model(mp).file, ": the optimizer's '", name,
                      "' is not a parameter of the module");
      }
      group.parameters.push_back(*index);
    }
    out.groups.push_back(std::move(group));
  }
  return {};
}

}  // namespace

Status NameUnsharded(const TagFiles& files, const Parsed& parsed, const StateDictNames& spellings,
                     Named& out) {
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    const ModelStates& model = parsed.model(mp);
    if (!model.optimizer || files.options.weights_only) continue;
    if (!model.has_module || !parsed.experts.empty()) {
      out.left_out.push_back(
          {LeftOutPart::kOptimizer, StrCat("the optimizer in ", model.file),
           StrCat("states without ZeRO of a ",
                  model.has_module ? "mixture of experts" : "pipeline",
                  " have no parameter names"),
           ""});
      continue;
    }
    const std::vector<NamedShape> candidates = Candidates(model, spellings, out);
    CKPT_ASSIGN_OR_RETURN(const GroupNames groups, NamesOfGroups(model, spellings, candidates));
    CKPT_RETURN_IF_ERROR(AddGroups(parsed, mp, groups, out));
    std::set<std::string> trained;
    for (const auto& group : groups) trained.insert(group.begin(), group.end());
    for (const NamedShape& candidate : candidates) {
      if (trained.contains(candidate.name)) continue;
      out[*out.Find(candidate.name)].role = Role::kFrozen;
    }
  }
  if (!out.groups.empty()) {
    out.notes.emplace_back(
        "stage 0: the optimizer numbers its parameters; they were matched in model order");
  }
  return {};
}

}  // namespace ckptfs::deepspeed::native
