// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/commands/step_json.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

struct StatusFlags {
  LiveOptions live;
  bool json = false;
};

// "key: value" lines, nested objects indented.
void PrintTree(const Json& json, const std::string& indent) {
  const bool list = json.is_array();
  for (const auto& [key, value] : json.items()) {
    const std::string label = list ? indent + "- " : indent + key + ": ";
    if (value.is_structured() && !value.empty()) {
      fmt::print("{}\n", Printable(label));
      PrintTree(value, indent + "  ");
    } else {
      const std::string text = value.is_string()
                                   ? value.get<std::string>()
                                   : value.dump(-1, ' ', false, Json::error_handler_t::replace);
      fmt::print("{}{}\n", Printable(label), Printable(text));
    }
  }
}

Status RunStatus(const StatusFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<LiveMount> mounts, ChooseMounts(options.live, true));
  Json all = Json::array();
  for (const LiveMount& mount : mounts) {
    const auto text = AskDaemon(mount, "status");
    if (!text) return Fail(Error(text.error()).WithContext(mount.mountpoint));
    all.push_back({{"mountpoint", mount.mountpoint},
                   {"store", mount.store},
                   {"pid", mount.pid},
                   {"status", Json::parse(*text, nullptr, false)}});
  }
  if (options.json) {
    PrintJson(all);
    return {};
  }
  for (const Json& mount : all) PrintTree(mount, "");
  return {};
}

}  // namespace

void AddStatusCommand(CommandSet& commands) {
  auto options = std::make_shared<StatusFlags>();
  Command& command = commands.Add("status", "What live mounts have served, and how");
  AddLiveOptions(command, options->live);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunStatus(*options); };
}

}  // namespace ckptfs
