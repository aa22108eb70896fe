// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/torch_optimizer.h"

#include <set>
#include <utility>

#include "core/base/strings.h"
#include "formats/deepspeed/whole_states.h"

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

Status ReadNames(PickleRef groups, CopyBudget& budget, TorchOptimizer& out) {
  for (size_t g = 0; g < out.groups.size(); ++g) {
    out.names.emplace_back();
    const PickleRef given = groups.at(g)["param_names"];
    const PickleRef members = groups.at(g)["params"];
    for (size_t i = 0; i < out.groups[g].members.size(); ++i) {
      const auto key = members.at(i).String();
      const auto name = key ? key : given && given.IsSequence() ? given.at(i).String() : key;
      CKPT_RETURN_IF_ERROR(budget.Charge(name.value_or("").size()));
      if (name) out.names.back().emplace_back(*name);
    }
    if (out.names.back().size() != out.groups[g].members.size()) out.names.back().clear();
  }
  return {};
}

std::string KeyText(PickleRef key) {
  if (const auto name = key.String()) return std::string(*name);
  const auto number = key.Int();
  return number ? std::to_string(*number) : "?";
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
  std::set<std::string> named;
  const PickleRef groups = dict["param_groups"];
  for (size_t g = 0; g < out.groups.size(); ++g) {
    for (const auto& [key, value] : groups.at(g).Items()) {
      const bool members = key.String() == "params" || key.String() == "param_names";
      if (members || RunsNoCode(value) || !named.insert(KeyText(key)).second) continue;
      out.left_out.push_back(
          {LeftOutPart::kOptimizer, StrCat("the optimizer's setting '", KeyText(key), "'"),
           StrCat("setting '", KeyText(key), "' is neither a number nor text"), ""});
    }
  }
}

}  // namespace

Result<TorchOptimizer> ReadTorchOptimizer(PickleRef dict, const TorchFile& file, BlobIndex blob) {
  TorchOptimizer out;
  const PickleRef groups = dict["param_groups"];
  CopyBudget budget(file.tree());
  CKPT_ASSIGN_OR_RETURN(out.groups, ReadHyperGroups(groups, budget));
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
      if (known != numbers.end()) number = known->second;
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

std::vector<std::vector<OptimizerMember>> MembersOf(const TorchOptimizer& optimizer) {
  std::vector<std::vector<OptimizerMember>> out;
  for (size_t g = 0; g < optimizer.groups.size(); ++g) {
    out.emplace_back();
    const std::vector<int64_t>& numbers = optimizer.groups[g].members;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const bool named = i < optimizer.names[g].size();
      const auto state = optimizer.states.find(numbers[i]);
      out.back().push_back({named ? optimizer.names[g][i] : "",
                            state == optimizer.states.end() ? std::vector<MemberState>()
                                                            : MemberStatesOf(state->second),
                            {}});
    }
  }
  return out;
}

Result<OwnedMembers> OwnMembers(const OwnershipQuestion& question, const std::string& where) {
  CKPT_ASSIGN_OR_RETURN(const StateOwners owners, DecideOwners(question));
  OwnedMembers out;
  if (!owners.why.empty()) {
    out.left_out.push_back(WholeOptimizer(
        where, StrCat("it numbers its parameters, but ", owners.why), owners.remedy));
    return out;
  }
  out.groups.emplace();
  bool any = question.groups.empty();
  for (size_t g = 0; g < owners.groups.size(); ++g) {
    OwnedGroup& group = out.groups->emplace_back();
    for (size_t i = 0; i < owners.groups[g].size(); ++i) {
      const Owner& owner = owners.groups[g][i];
      if (owner.parameter) {
        group.members.push_back(i);
        group.parameters.push_back(*owner.parameter);
        any = true;
      } else {
        out.left_out.push_back({LeftOutPart::kOptimizer,
                                StrCat("the optimizer's '", question.groups[g][i].name, "'"),
                                "the name is not that of a parameter of the model", ""});
      }
    }
  }
  if (!any) out.groups.reset();
  return out;
}

LeftOut WholeOptimizer(const std::string& where, std::string why, std::string remedy) {
  return {LeftOutPart::kOptimizer, StrCat("the optimizer in ", where), std::move(why),
          std::move(remedy)};
}

}  // namespace ckptfs::deepspeed
