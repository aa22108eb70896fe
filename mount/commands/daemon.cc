// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <string>

#include "mount/commands/command_set.h"
#include "mount/daemon/daemon_process.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

struct DaemonFlags {
  DaemonRequest request;
  std::string store;
  SnapshotFlags snapshots;
  std::string log_format;
  bool foreground = false;
  std::string config;
};

// Relative paths end here: the daemon's working directory is /.
Result<DaemonRequest> RequestOf(const DaemonFlags& options) {
  DaemonRequest request = options.request;
  CKPT_ASSIGN_OR_RETURN(request.snapshots, SnapshotRequestOf(options.snapshots));
  CKPT_ASSIGN_OR_RETURN(request.snapshots.store, StorePath(options.store));
  request.log = AbsoluteLog(request.log);
  CKPT_ASSIGN_OR_RETURN(request.log_format, LogFormatOf(options.log_format));
  return request;
}

Status StartDaemon(const DaemonFlags& options, const Command& command) {
  CKPT_ASSIGN_OR_RETURN(DaemonRequest request, RequestOf(options));
  request.again = CommandAgain(command, request.snapshots.store);
  request.configuration = ConfigurationOf(command);
  return RunService(options.foreground, request.log,
                    [&](const auto& ready) { return RunDaemon(request, ready); });
}

}  // namespace

void AddDaemonCommand(CommandSet& commands) {
  auto options = std::make_shared<DaemonFlags>();
  Command& command = commands.Add("daemon", "Receive snapshots for a store, without a mount");
  AddStoreOption(command, options->store);
  AddSnapshotOptions(command, options->snapshots);
  command.Add("--log", options->request.log, "Where the daemon logs (default: log/ in the store)")
      .Value("FILE|syslog|stderr");
  AddLogFormatOption(command, options->log_format);
  AddMetricsOption(command, options->request.metrics_listen);
  command.Add("--foreground", options->foreground, "Stay in the foreground; log to stderr");
  AddConfigOption(command, options->config);
  command.body = [options, &command] { return StartDaemon(*options, command); };
}

}  // namespace ckptfs
