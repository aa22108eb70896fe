// SPDX-License-Identifier: Apache-2.0

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

struct Options {
  LiveOptions live;
  std::string layout;
  std::string path;
};

Status Run(const Options& options) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<LiveMount> mounts, ChooseMounts(options.live));
  for (const LiveMount& mount : mounts) {
    const auto done =
        AskDaemon(mount, "warm", {{"layout", options.layout}, {"prefix", options.path}});
    if (!done) return Fail(Error(done.error()).WithContext(mount.mountpoint));
    const auto result = nlohmann::json::parse(*done, nullptr, false);
    const uint64_t bytes = result.is_object() ? result.value("bytes", uint64_t{0}) : 0;
    std::printf("%s: %s in memory\n", mount.mountpoint.c_str(), HumanBytes(bytes).c_str());
  }
  return {};
}

}  // namespace

void AddWarmCommand(CommandSet& commands) {
  auto options = std::make_shared<Options>();
  CLI::App* command = commands.Add("warm", "Fill a layout's files into memory before they are read");
  command->add_option("LAYOUT", options->layout, "Of the step /view shows, or RUN/ID/LAYOUT")
      ->required();
  command->add_option("PATH", options->path, "Only what lies below it, such as rank0");
  AddLiveOptions(command, options->live);
  commands.SetBody(command, [options] { return Run(*options); });
}

}  // namespace ckptfs
