// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/torch_optimizer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/strings.h"
#include "formats/settle/settle.h"

namespace ckptfs::deepspeed {
namespace {

// The numbers of members whose keys are names: in the order of the groups.
std::map<std::string, int64_t> NumberNames(PickleRef groups, TorchOptimizer& out) {
  std::map<std::string, int64_t> numbers;
  int64_t next = 0;
  for (size_t g = 0; g < out.groups.size(); ++g) {
    const PickleRef members = groups.at(g)["params"];
    for (size_t i = 0; i < out.groups[g].members.size(); ++i) {
      const auto name = members.at(i).String();
      if (!name) continue;
      numbers.emplace(*name, next);
      out.groups[g].members[i] = next++;
    }
  }
  return numbers;
}

// True if a member's key is a text that is not a number.
bool HasNames(PickleRef groups, const TorchOptimizer& torch) {
  for (size_t g = 0; g < torch.groups.size(); ++g) {
    const PickleRef members = groups.at(g)["params"];
    for (size_t i = 0; i < torch.groups[g].members.size(); ++i) {
      const auto key = members.at(i).String();
      if (key && !MemberNumber(*key)) return true;
    }
  }
  return false;
}

Status ReadNames(PickleRef groups, CopyBudget& budget, TorchOptimizer& out) {
  const bool names = HasNames(groups, out);
  for (size_t g = 0; g < out.groups.size(); ++g) {
    out.names.emplace_back();
    PickleRef given = groups.at(g)["param_names"];
    if (!given) given = groups.at(g)[kMemberNames];
    const PickleRef members = groups.at(g)["params"];
    for (size_t i = 0; i < out.groups[g].members.size(); ++i) {
      auto name = names ? members.at(i).String() : std::nullopt;
      if (!name && given && given.IsSequence()) name = given.at(i).String();
      CKPT_RETURN_IF_ERROR(budget.Charge(name.value_or("").size()));
      if (name) out.names.back().emplace_back(*name);
    }
    if (out.names.back().size() != out.groups[g].members.size()) out.names.back().clear();
  }
  return {};
}

// Names what no view shows: parts of the dict that torch's own optimizers do not have, and
// settings that are tensors or objects.
void LeaveOutUnknown(PickleRef dict, TorchOptimizer& out) {
  for (const auto& [key, value] : dict.Items()) {
    if (key.String() == "state" || key.String() == "param_groups") continue;
    out.left_out.push_back({LeftOutPart::kOptimizer, StrCat("the optimizer's '", KeyText(key), "'"),
                            StrCat("'", KeyText(key), "' is neither 'state' nor 'param_groups'"),
                            ""});
  }
  const auto settings = LeftOutSettings(out.groups, "");
  out.left_out.insert(out.left_out.end(), settings.begin(), settings.end());
}

}  // namespace

Result<TorchOptimizer> ReadTorchOptimizer(PickleRef dict, const TorchFile& file, BlobIndex blob) {
  TorchOptimizer out;
  const PickleRef groups = dict["param_groups"];
  CopyBudget budget(file.tree());
  CKPT_ASSIGN_OR_RETURN(out.groups, ReadHyperGroups(groups, file, budget));
  CKPT_RETURN_IF_ERROR(ReadNames(groups, budget, out));
  const std::map<std::string, int64_t> numbers = NumberNames(groups, out);
  LeaveOutUnknown(dict, out);
  const PickleRef states = dict["state"];
  if (!states) return out;
  if (!states.IsDict()) return Refuse("'state' is not a dict");
  std::set<int64_t> members;
  for (const HyperGroup& group : out.groups) {
    members.insert(group.members.begin(), group.members.end());
  }
  for (const auto& [key, value] : states.Items()) {
    auto number = key.Int();
    if (const auto name = key.String()) {
      const auto known = numbers.find(std::string(*name));
      number = known != numbers.end() ? known->second : MemberNumber(*name);
    }
    const bool known = number && members.contains(*number);
    if (!known || !value.IsDict()) {
      out.left_out.push_back(
          {LeftOutPart::kOptimizer, StrCat("the optimizer's state '", KeyText(key), "'"),
           known ? "it is not a dict" : "it belongs to no parameter of 'param_groups'", ""});
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(PartitionStates state,
                          ReadStateDict(value, file, blob, budget, OtherTensors::kOpaque));
    out.states.emplace(*number, std::move(state));
    out.values.emplace(*number, value);
  }
  return out;
}

void AddTo(const PartitionStates& states, const StateDict::State& like, Holder holder,
           StateDict& dict) {
  const auto add = [&](const std::string& kind) -> StateDict::State& {
    StateDict::State& added = dict.states.emplace_back(like);
    added.kind = kind;
    return added;
  };
  for (const NamedTensor& entry : states.flat) {
    StateDict::State& added = add(entry.name);
    added.dtype = entry.tensor.dtype();
    added.shape = entry.tensor.shape();
    added.place = PlaceTensor(entry.tensor, holder);
  }
  for (const NamedScalar& entry : states.scalars) {
    StateDict::State& added = add(entry.name);
    added.shape = entry.value.shape;
    if (entry.tensor) {
      added.dtype = entry.tensor->dtype();
      added.place = PlaceTensor(*entry.tensor, holder);
    }
    added.scalar = [&value = entry.value] { return std::optional(value); };
  }
  for (const std::string& kind : states.opaque) {
    add(kind).none = std::ranges::find(states.nothing, kind) != states.nothing.end();
  }
}

void AddTo(const TorchOptimizer& torch, size_t optimizer, StateDict& dict) {
  for (size_t g = 0; g < torch.groups.size(); ++g) {
    StateDict::Group group{optimizer, torch.groups[g].hyper_parameters, {}};
    group.tensors = torch.groups[g].numbers;
    for (size_t i = 0; i < torch.groups[g].members.size(); ++i) {
      const int64_t number = torch.groups[g].members[i];
      group.members.push_back({i < torch.names[g].size() ? torch.names[g][i] : "", number});
      const auto states = torch.states.find(number);
      if (states != torch.states.end()) AddTo(states->second, {optimizer, number, ""}, {}, dict);
    }
    dict.groups.push_back(std::move(group));
  }
}

}  // namespace ckptfs::deepspeed
