// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/configuration.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/strings.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

// Names of options whose values differ.
std::vector<std::string> Differing(const OptionValues& was, const OptionValues& now) {
  std::set<std::string> names;
  for (const auto& [name, values] : was) names.insert(name);
  for (const auto& [name, values] : now) names.insert(name);
  std::vector<std::string> differing;
  for (const std::string& name : names) {
    const auto before = was.find(name);
    const auto after = now.find(name);
    const bool same = before != was.end() && after != now.end() && before->second == after->second;
    if (!same) differing.push_back(name);
  }
  return differing;
}

void TakeOver(const std::string& name, const OptionValues& now, OptionValues& values) {
  const auto found = now.find(name);
  if (found == now.end()) {
    values.erase(name);
  } else {
    values[name] = found->second;
  }
}

}  // namespace

std::string ValueOf(const OptionValues& values, std::string_view option, std::string_view absent) {
  const auto found = values.find(option);
  return found == values.end() || found->second.empty() ? std::string(absent) : found->second[0];
}

void Configuration::May(std::vector<std::string> options, Apply apply) {
  changeable_.push_back({std::move(options), std::move(apply)});
}

Result<nlohmann::json> Configuration::Reload() {
  const MutexLock one(reload_);
  if (!request_.read_again) {
    return Fail(Error{ErrorCode::kInvalid, "it was not started with --config"}.Needing(
        "`ckptfs mount --config FILE`"));
  }
  CKPT_ASSIGN_OR_RETURN(const OptionValues now, request_.read_again());
  std::vector<std::string> differing = Differing(request_.values, now);
  nlohmann::json report = {{"file", request_.file},
                           {"applied", nlohmann::json::array()},
                           {"needs_restart", nlohmann::json::array()},
                           {"failed", nlohmann::json::array()}};
  for (const Changeable& part : changeable_) {
    const auto concerned = [&](const std::string& name) {
      return std::ranges::find(part.options, name) != part.options.end();
    };
    std::vector<std::string> names;
    std::ranges::copy_if(differing, std::back_inserter(names), concerned);
    if (names.empty()) continue;
    const Status applied = part.apply(now);
    std::erase_if(differing, concerned);
    for (const std::string& name : names) {
      if (applied) {
        TakeOver(name, now, request_.values);
        report["applied"].push_back(name);
      } else {
        report["failed"].push_back({{"option", name}, {"why", applied.error().message}});
      }
    }
  }
  report["needs_restart"] = differing;
  Log(LogLevel::kInfo,
      StrCat(request_.file, " was read again: ", report["applied"].size(), " options changed, ",
             differing.size(), " wait for the next start, ", report["failed"].size(), " failed"));
  const MutexLock lock(mutex_);
  waiting_ = std::move(differing);
  return report;
}

nlohmann::json Configuration::Describe() const {
  const MutexLock lock(mutex_);
  return {{"file", request_.file.empty() ? nlohmann::json(nullptr) : nlohmann::json(request_.file)},
          {"from_file", request_.from_file},
          {"needs_restart", waiting_}};
}

}  // namespace ckptfs
