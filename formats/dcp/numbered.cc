// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/numbered.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/state/ownership.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kStates = "state.";
constexpr std::string_view kGroupKeys = "param_groups.";
constexpr std::string_view kMembersKey = ".params";
constexpr std::string_view kNames =
    "save what get_optimizer_state_dict gives, which has names; `--weights-only` takes the weights "
    "alone, without this message";
constexpr std::string_view kTwo = "--parameter-order is for one optimizer only";

// An optimizer's states by number, and the numbers of its groups.
struct Numbered {
  std::map<uint64_t, std::vector<MemberState>> states;
  std::vector<std::vector<uint64_t>> groups;
};

// "3" and "exp_avg" of "3.exp_avg".
struct NumberedKey {
  uint64_t number = 0;
  std::string_view kind;
};

std::optional<NumberedKey> NumberedKeyOf(std::string_view rest) {
  NumberedKey out;
  const size_t dot = rest.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const auto [end, code] = std::from_chars(rest.data(), rest.data() + dot, out.number);
  if (code != std::errc() || end != rest.data() + dot) return std::nullopt;
  out.kind = rest.substr(dot + 1);
  return out;
}

bool BeginsWithOneOf(std::string_view rest, const std::set<std::string_view>& names) {
  for (size_t dot = rest.find('.'); dot != rest.npos; dot = rest.find('.', dot + 1)) {
    if (names.contains(rest.substr(0, dot))) return true;
  }
  return false;
}

// By optimizer's prefix.  Objects are None or settings: nothing that tells a shape.
std::map<std::string, Numbered> StatesOf(const DcpMetadata& metadata, const StateKeys& keys) {
  std::set<std::string_view> names;
  for (const auto& weight : keys.weights) names.insert(weight.name);
  std::map<std::string, Numbered> out;
  for (size_t i = 0; i < metadata.tensors.size(); ++i) {
    const std::string_view key = metadata.tensors[i].name;
    for (const std::string& prefix : keys.optimizers) {
      if (!key.starts_with(prefix) || !key.substr(prefix.size()).starts_with(kStates)) continue;
      const std::string_view rest = key.substr(prefix.size() + kStates.size());
      const auto numbered = NumberedKeyOf(rest);
      const bool named = !IsCounted(metadata.tensor_paths[i]) && BeginsWithOneOf(rest, names);
      if (!numbered || named) continue;
      out[prefix].states[numbered->number].push_back(
          {std::string(numbered->kind), metadata.tensors[i].shape});
      break;
    }
  }
  return out;
}

// "3" of "<prefix>param_groups.3.params".
std::optional<uint32_t> GroupOf(std::string_view key, const std::string& prefix) {
  if (!key.starts_with(prefix)) return std::nullopt;
  key.remove_prefix(prefix.size());
  if (!key.starts_with(kGroupKeys) || !key.ends_with(kMembersKey)) return std::nullopt;
  key = key.substr(kGroupKeys.size(), key.size() - kGroupKeys.size() - kMembersKey.size());
  uint32_t group = 0;
  const auto [end, code] = std::from_chars(key.data(), key.data() + key.size(), group);
  const bool all = code == std::errc() && end == key.data() + key.size();
  return all ? std::optional(group) : std::nullopt;
}

Status ReadMembers(const DcpMetadata& metadata, const std::string& prefix,
                   const NumbersOf& numbers_of, Numbered& out) {
  std::map<uint32_t, size_t> groups;
  for (size_t i = 0; i < metadata.objects.size(); ++i) {
    if (const auto group = GroupOf(metadata.objects[i].name, prefix)) groups.emplace(*group, i);
  }
  for (const auto& [group, object] : groups) {
    CKPT_ASSIGN_OR_RETURN(std::vector<uint64_t> members, numbers_of({true, object}));
    out.groups.push_back(std::move(members));
  }
  if (!groups.empty()) return {};
  out.groups.emplace_back();
  for (const auto& [number, states] : out.states) out.groups.back().push_back(number);
  return {};
}

std::vector<OwnableParameter> ParametersOf(const DcpMetadata& metadata, const StateKeys& keys) {
  std::vector<OwnableParameter> out;
  for (const auto& weight : keys.weights) {
    const TensorEntry& tensor = metadata.tensors[weight.tensor];
    if (IsFloat(tensor.dtype)) out.push_back({weight.name, tensor.shape});
  }
  return out;
}

}  // namespace

bool MayBeNumbered(const DcpMetadata& metadata) {
  return std::ranges::any_of(metadata.tensors, [](const TensorEntry& tensor) {
    const size_t at = tensor.name.find(kStates);
    const size_t number = at + kStates.size();
    return at != std::string::npos && number < tensor.name.size() && IsDigit(tensor.name[number]);
  });
}

Result<NumberedOwners> OwnersOfNumbers(const DcpMetadata& metadata, const StateKeys& keys,
                                       std::span<const std::string> given,
                                       const NumbersOf& numbers_of) {
  NumberedOwners out;
  std::map<std::string, Numbered> optimizers = StatesOf(metadata, keys);
  if (optimizers.empty()) return out;
  if (optimizers.size() > 1) {
    out.why = StrCat(optimizers.size(), " optimizers number their parameters, but ", kTwo);
    out.remedy = kNames;
    return out;
  }
  Numbered& numbered = optimizers.begin()->second;
  CKPT_RETURN_IF_ERROR(ReadMembers(metadata, optimizers.begin()->first, numbers_of, numbered));
  std::vector<std::vector<OptimizerMember>> members;
  for (const auto& group : numbered.groups) {
    members.emplace_back();
    for (const uint64_t number : group) {
      const auto states = numbered.states.find(number);
      members.back().push_back(
          {"", states == numbered.states.end() ? std::vector<MemberState>() : states->second, {}});
    }
  }
  const std::vector<OwnableParameter> parameters = ParametersOf(metadata, keys);
  CKPT_ASSIGN_OR_RETURN(const StateOwners owners,
                        DecideOwners({parameters, members, {}, given, {}, {}}));
  out.why = owners.why.empty() ? "" : StrCat("it numbers its parameters, but ", owners.why);
  out.remedy = owners.remedy;
  if (!out.why.empty()) return out;
  uint64_t next = 0;
  for (size_t g = 0; g < owners.groups.size(); ++g) {
    for (size_t i = 0; i < owners.groups[g].size(); ++i) {
      if (numbered.groups[g][i] != next++) {
        out.order.clear();
        out.why = "its parameters are not numbered in the order of its groups";
        out.remedy = kNames;
        return out;
      }
      out.order.push_back(parameters[*owners.groups[g][i].parameter].name);
    }
  }
  return out;
}

}  // namespace ckptfs::dcp
