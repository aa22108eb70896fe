// SPDX-License-Identifier: Apache-2.0
//
// Names of stage 0, where the optimizer lies in the model states file.

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "core/base/strings.h"
#include "core/state/state_dict.h"
#include "formats/deepspeed/native/master_prints.h"
#include "formats/deepspeed/native/named.h"
#include "formats/settle/member_owners.h"
#include "formats/settle/settle.h"
#include "formats/tools/trainer_rule.h"

namespace ckptfs::deepspeed::native {
namespace {

using Form = UnshardedOptimizer::Form;

// Members whose owners are known: numbers in their group, and names.
struct Members {
  std::vector<size_t> numbers;
  std::vector<std::string> names;
};
using Groups = std::vector<Members>;

// The outcome for a rank's optimizer.
struct Told {
  std::optional<Groups> groups;  // nothing: it is left out
  std::vector<LeftOut> left_out;
};

constexpr std::string_view kAlone =
    "`--weights-only` takes the weights alone, without this "
    "message";

std::string WhatOf(const ModelStates& model) {
  return StrCat("the optimizer in ", LastComponent(model.file));
}

Told Nothing(const ModelStates& model, std::string why) {
  return {std::nullopt,
          {{LeftOutPart::kOptimizer, WhatOf(model), std::move(why), std::string(kAlone)}}};
}

// FP16_Optimizer makes a group's weights views of one storage: each storage
// that parameters tile without a gap, and their names in its order, by elements.
std::map<uint64_t, std::vector<Members>> TiledStorages(const ModelStates& model,
                                                       const StateDictNames& spellings) {
  std::map<std::string, std::map<uint64_t, const NamedTensor*>> storages;
  for (const NamedTensor& entry : model.module) {
    if (entry.tensor.elements() > 0 && entry.tensor.dense()) {
      storages[entry.tensor.storage_key()].try_emplace(entry.tensor.storage_offset(), &entry);
    }
  }
  std::map<uint64_t, std::vector<Members>> out;
  for (const auto& [key, tensors] : storages) {
    uint64_t at = 0;
    Members members;
    for (const auto& [offset, entry] : tensors) {
      if (offset != at) break;
      at += entry->tensor.elements();
      members.numbers.push_back(members.names.size());
      members.names.push_back(spellings.Of(entry->name));
    }
    if (members.names.size() == tensors.size() &&
        at == tensors.begin()->second->tensor.storage_elements()) {
      out[at].push_back(std::move(members));
    }
  }
  return out;
}

Told GroupsOfFused(const ModelStates& model, const StateDictNames& spellings) {
  const auto storages = TiledStorages(model, spellings);
  Groups out;
  std::set<uint64_t> used;
  for (const FileTensor& master : model.optimizer->flat_masters) {
    const auto found = storages.find(master.elements());
    const bool clear = found != storages.end() && found->second.size() == 1 &&
                       used.insert(master.elements()).second;
    if (!clear) {
      return Nothing(model,
                     StrCat("no single storage of the module's weights has the ", master.elements(),
                            " elements of a flat fp32 group, so nothing "
                            "proves the order of its parameters"));
    }
    out.push_back(found->second.front());
  }
  return {std::move(out), {}};
}

// The parameters that an optimizer could have: the module without buffers and second names.
struct Candidates {
  StateDict dict;
  std::vector<const FileTensor*> weights;
};

Candidates CandidatesOf(const ModelStates& model, const StateDictNames& spellings,
                        const Named& named) {
  Candidates out;
  std::set<std::string> seen = BufferNames(model);
  for (const NamedTensor& entry : model.module) {
    std::string name = spellings.Of(entry.name);
    if (named.aliases.contains(name) || !seen.insert(name).second) continue;
    out.dict.tensors.push_back({std::move(name), entry.tensor.dtype(), entry.tensor.shape(),
                                PlaceTensor(entry.tensor), Role::kTrainable});
    out.weights.push_back(&entry.tensor);
  }
  out.dict.second_names.assign(named.aliases.begin(), named.aliases.end());
  return out;
}

Result<Told> GroupsOf(const TagFiles& files, uint32_t mp, const ModelStates& model,
                      Candidates& candidates) {
  const UnshardedOptimizer& optimizer = *model.optimizer;
  StateDict& dict = candidates.dict;
  StateDict::Optimizer& added = dict.optimizers.emplace_back();
  added.what = WhatOf(model);
  added.left_out = optimizer.left_out;
  added.rule = [&](auto hyper_parameters, auto parameters) {
    return TrainerRule(files.step, hyper_parameters, parameters);
  };
  AddTo(optimizer, 0, dict);
  if (optimizer.form == Form::kUnfused) {
    for (size_t g = 0; g < optimizer.parameter_masters.size() && g < dict.groups.size(); ++g) {
      const auto& masters = optimizer.parameter_masters[g];
      auto& members = dict.groups[g].members;
      for (size_t i = 0; i < masters.size() && i < members.size(); ++i) {
        members[i].master = masters[i].shape();
      }
    }
    added.masters = [&]() -> Result<MasterPrints> {
      CKPT_ASSIGN_OR_RETURN(const TorchFile file, files.Open(files.names.model.at(mp)));
      return PrintsOf(file, optimizer, candidates.weights);
    };
  }
  StepModel told;
  CKPT_ASSIGN_OR_RETURN(const MemberOwners owners, OwnersOfMembers(dict, files.options, told));
  Told out{std::nullopt, std::move(told.left_out)};
  if (!owners.numbers[0]) return out;
  out.groups.emplace();
  for (const StateDict::Group& group : dict.groups) {
    Members& of_group = out.groups->emplace_back();
    for (size_t i = 0; i < group.members.size(); ++i) {
      const auto tensor = owners.numbers[0]->at(*group.members[i].number);
      if (!tensor) continue;
      of_group.numbers.push_back(i);
      of_group.names.push_back(dict.tensors[*tensor].name);
    }
  }
  return out;
}

// Adds the groups of one rank.
Status AddGroups(const Parsed& parsed, uint32_t mp, const Groups& groups, Named& out) {
  std::set<ParameterIndex> stored;
  for (const NamedWeight& weight : out.weights) {
    if (weight.tp == mp % parsed.tp) stored.insert(weight.parameter);
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    NamedGroup group{mp, g, std::nullopt, {}, groups[g].numbers};
    for (const std::string& name : groups[g].names) {
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

Result<Told> GroupsOfRank(const TagFiles& files, const Parsed& parsed, uint32_t mp,
                          const StateDictNames& spellings, Candidates& candidates) {
  const ModelStates& model = parsed.model(mp);
  if (!model.has_module || !parsed.experts.empty()) {
    return Nothing(model, StrCat("without ZeRO the states of a ",
                                 model.has_module ? "mixture of experts" : "pipeline",
                                 " have numbers and no names"));
  }
  if (model.optimizer->form == Form::kFused) return GroupsOfFused(model, spellings);
  return GroupsOf(files, mp, model, candidates);
}

}  // namespace

// One rank's states without the others' would be a part of them, so all are proved or none.
Status NameUnsharded(const TagFiles& files, const Parsed& parsed, const StateDictNames& spellings,
                     Named& out) {
  std::map<uint32_t, std::pair<Candidates, Groups>> ranks;
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    const ModelStates& model = parsed.model(mp);
    if (!model.optimizer || files.options.weights_only) continue;
    Candidates candidates = CandidatesOf(model, spellings, out);
    CKPT_ASSIGN_OR_RETURN(Told told, GroupsOfRank(files, parsed, mp, spellings, candidates));
    out.left_out.insert(out.left_out.end(), told.left_out.begin(), told.left_out.end());
    if (!told.groups) return {};
    ranks.emplace(mp, std::pair(std::move(candidates), *std::move(told.groups)));
  }
  for (const auto& [mp, rank] : ranks) {
    const auto& [candidates, groups] = rank;
    CKPT_RETURN_IF_ERROR(AddGroups(parsed, mp, groups, out));
    std::set<std::string> trained;
    for (const Members& group : groups) trained.insert(group.names.begin(), group.names.end());
    for (const StateDict::Tensor& candidate : candidates.dict.tensors) {
      if (trained.contains(candidate.name)) continue;
      out[*out.Find(candidate.name)].role = Role::kFrozen;
    }
  }
  return {};
}

}  // namespace ckptfs::deepspeed::native
