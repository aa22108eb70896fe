// SPDX-License-Identifier: Apache-2.0

#include "core/state/joined_names.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

namespace ckptfs {
namespace {

using Names = std::set<std::string, std::less<>>;

constexpr size_t kMaxParts = 64;  // a name of more is joined with nothing
constexpr std::string_view kWholeModules = "modules_to_save";  // PEFT puts it before the adapter's

std::vector<std::string_view> PartsOf(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= name.size();) {
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

// The only name that leaving out one such part makes of it; nothing if it is not of `names`.
std::optional<std::string> Joined(std::string_view name, std::string_view part,
                                  const Names& names) {
  std::optional<std::string> found;
  const std::vector<std::string_view> parts = PartsOf(name);
  if (parts.size() > kMaxParts) return std::nullopt;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] != part) continue;
    std::string shorter = Without(parts, i);
    if (!names.contains(shorter) || found == shorter) continue;
    if (found) return std::nullopt;
    found = std::move(shorter);
  }
  return found;
}

std::optional<std::map<std::string, std::string>> JoinedBy(std::string_view part,
                                                           const Names& others,
                                                           const Names& names) {
  std::map<std::string, std::string> out;
  Names used;
  for (const std::string& other : others) {
    auto name = Joined(other, part, names);
    if (!name || !used.insert(*name).second) return std::nullopt;
    out.emplace(other, *std::move(name));
  }
  return out;
}

}  // namespace

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
