// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "mount/commands/command_set.h"
#include "mount/daemon_process.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

struct DaemonFlags {
  DaemonRequest request;
  std::string store;
  SnapshotFlags snapshots;
  bool foreground = false;
};

// Relative paths end here: the daemon's working directory is /.
Result<DaemonRequest> RequestOf(const DaemonFlags& options) {
  DaemonRequest request = options.request;
  CKPT_ASSIGN_OR_RETURN(request.snapshots, SnapshotRequestOf(options.snapshots));
  CKPT_ASSIGN_OR_RETURN(request.snapshots.store, StorePath(options.store));
  request.log = AbsoluteLog(request.log);
  return request;
}

// As the mount's: its parent only sees a code.
int ServeSnapshots(const DaemonRequest& request, const std::function<void()>& ready) {
  const Status done = RunDaemon(request, ready);
  if (done) return 0;
  fmt::print(stderr, "ckptfs: {}\n", Printable(done.error().message));
  return static_cast<int>(ExitCodeOf(done.error().code));
}

Status StartDaemon(const DaemonFlags& options) {
  CKPT_ASSIGN_OR_RETURN(DaemonRequest request, RequestOf(options));
  if (!options.foreground) {
    return ExitWith(
        RunInBackground([&](const auto& ready) { return ServeSnapshots(request, ready); }));
  }
  if (request.log.empty()) request.log = "stderr";
  return RunDaemon(request, [] {});
}

}  // namespace

void AddDaemonCommand(CommandSet& commands) {
  auto options = std::make_shared<DaemonFlags>();
  Command& command = commands.Add("daemon", "Receive snapshots for a store, without a mount");
  AddStoreOption(command, options->store);
  AddSnapshotOptions(command, options->snapshots);
  command
      .Add("--log", options->request.log, "Where the daemon logs (default: log/ in the store)")
      .Value("FILE|syslog|stderr");
  command.Add("--foreground", options->foreground, "Stay in the foreground; log to stderr");
  command.body = [options] { return StartDaemon(*options); };
}

}  // namespace ckptfs
