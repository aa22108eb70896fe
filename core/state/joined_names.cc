// SPDX-License-Identifier: Apache-2.0

#include "core/state/joined_names.h"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace ckptfs {
namespace {

using Names = std::set<std::string, std::less<>>;

constexpr std::string_view kWholeModules = "modules_to_save";  // PEFT puts it before the adapter's

// How the attributes begin in which PEFT's layers keep their adapters, by name.
constexpr auto kAdapterDicts = std::to_array<std::string_view>(
    {"lora_", "modules_to_save", "ia3_", "hada_", "lokr_", "oft_", "boft_", "vera_", "fourierft_",
     "adalora_", "trainable_tokens_"});
// Attributes in which wrappers of torch keep the module.
constexpr auto kWrappers = std::to_array<std::string_view>(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"});

// Returns at most one part more than names that are joined may have.
std::vector<std::string_view> PartsOf(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= name.size() && parts.size() <= kMaxNameParts;) {
    const size_t end = std::min(name.find('.', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

// Without one of the parts, and what PEFT has before it.
std::string Without(const std::vector<std::string_view>& parts, size_t left_out) {
  std::string out;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i == left_out || (i + 1 == left_out && parts[i] == kWholeModules)) continue;
    if (!out.empty()) out += '.';
    out += parts[i];
  }
  return out;
}

// True if live names may have the part where files do not.
bool MayGo(const std::vector<std::string_view>& parts, size_t at) {
  if (std::ranges::find(kWrappers, parts[at]) != kWrappers.end()) return true;
  return at > 0 && std::ranges::any_of(kAdapterDicts, [&](std::string_view begin) {
           return parts[at - 1].starts_with(begin);
         });
}

// The only name that leaving out one part makes of it; nothing if no other has it.  `part`: the
// one, or "" for any.
template <class Has>
std::optional<JoinedName> Joined(std::string_view name, std::string_view part, const Has& has) {
  std::optional<JoinedName> found;
  const std::vector<std::string_view> parts = PartsOf(name);
  if (parts.size() > kMaxNameParts) return std::nullopt;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!MayGo(parts, i) || (!part.empty() && parts[i] != part)) continue;
    std::string shorter = Without(parts, i);
    if (!has(shorter) || (found && found->name == shorter)) continue;
    if (found) return std::nullopt;
    found = JoinedName{std::move(shorter), std::string(parts[i])};
  }
  return found;
}

std::optional<std::map<std::string, std::string>> JoinedBy(std::string_view part,
                                                           const Names& others,
                                                           const Names& names) {
  std::map<std::string, std::string> out;
  Names used;
  const auto has = [&](std::string_view name) { return names.contains(name); };
  for (const std::string& other : others) {
    auto joined = Joined(other, part, has);
    if (!joined || !used.insert(joined->name).second) return std::nullopt;
    out.emplace(other, std::move(joined->name));
  }
  return out;
}

}  // namespace

std::optional<JoinedName> JoinName(std::string_view live,
                                   const std::function<bool(std::string_view)>& has) {
  return Joined(live, "", has);
}

std::map<std::string, std::string> JoinNames(std::span<const std::string> model,
                                             std::span<const std::string> optimizer) {
  Names names(model.begin(), model.end());
  std::map<std::string, std::string> out;
  Names others;
  for (const std::string& name : optimizer) {
    if (names.contains(name)) {
      out.emplace(name, name);
    } else {
      others.insert(name);
    }
  }
  if (others.empty()) return out;
  for (const auto& [same, name] : out) names.erase(name);
  std::optional<std::map<std::string, std::string>> joined;
  std::set<std::string_view> tried;
  for (const std::string_view part : PartsOf(*others.begin())) {
    if (!tried.insert(part).second) continue;
    auto found = JoinedBy(part, others, names);
    if (!found) continue;
    if (joined) return out;
    joined = std::move(found);
  }
  if (joined) out.merge(*joined);
  return out;
}

}  // namespace ckptfs
