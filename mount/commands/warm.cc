// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "core/model/layout.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct WarmFlags {
  LiveOptions live;
  std::string layout;
  std::string path;
};

Result<Layout> LayoutOfPath(const std::string& text) {
  const size_t slash = text.rfind('/');
  return Layout::Parse(slash == std::string::npos ? text : text.substr(slash + 1));
}

// Says what is in memory now, and why the rest is not.
void Print(const std::string& mountpoint, const std::string& text) {
  auto result = nlohmann::json::parse(text, nullptr, false);
  if (!result.is_object()) result = nlohmann::json::object();
  fmt::print("{}: {}, {} in memory\n", Printable(mountpoint),
             Counted(result.value("files", uint64_t{0}), "file"),
             HumanBytes(result.value("bytes", uint64_t{0})));
  for (const auto& [reason, files] : result["skipped"].items()) {
    fmt::print("  {} not filled: {}\n", Counted(files.get<uint64_t>(), "file"), Printable(reason));
  }
}

Status RunWarm(const WarmFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<LiveMount> mounts, ChooseAnswering(options.live));
  for (const LiveMount& mount : mounts) {
    const auto done = AskDaemon(
        mount, "warm", {{"layout", options.layout}, {"prefix", options.path}}, Patience{0});
    if (!done) return Fail(Error(done.error()).WithContext(mount.mountpoint));
    Print(mount.mountpoint, *done);
  }
  return {};
}

}  // namespace

void AddWarmCommand(CommandSet& commands) {
  auto options = std::make_shared<WarmFlags>();
  Command& command = commands.Add("warm", "Fill a layout's files into memory before they are read");
  command.Add("LAYOUT", options->layout, "Of the step /view shows, or RUN/ID/LAYOUT")
      .Required()
      .Offers(kOfferNothing)
      .Check(Checked(LayoutOfPath));
  command.Add("PATH", options->path, "Only what lies below it, such as rank0")
      .Offers(kOfferNothing);
  AddLiveOptions(command, options->live);
  command.body = [options] { return RunWarm(*options); };
}

}  // namespace ckptfs
