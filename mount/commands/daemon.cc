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
  ServiceFlags service;
};

// Relative paths end here: the daemon's working directory is /.
Result<DaemonRequest> RequestOf(const DaemonFlags& options) {
  DaemonRequest request = options.request;
  CKPT_ASSIGN_OR_RETURN(request.snapshots, SnapshotRequestOf(options.snapshots));
  CKPT_ASSIGN_OR_RETURN(request.snapshots.store, StorePath(options.store));
  request.log = AbsoluteLog(request.log);
  CKPT_ASSIGN_OR_RETURN(request.log_format, LogFormatOf(options.service.log_format));
  return request;
}

Status StartDaemon(const DaemonFlags& options, const Command& command) {
  CKPT_ASSIGN_OR_RETURN(DaemonRequest request, RequestOf(options));
  request.again = CommandAgain(command, request.snapshots.store);
  request.configuration = ConfigurationOf(command);
  return RunService(options.service.foreground, request.log,
                    [&](const auto& ready) { return RunDaemon(request, ready); });
}

}  // namespace

void AddDaemonCommand(CommandSet& commands) {
  auto options = std::make_shared<DaemonFlags>();
  Command& command = commands.Add("daemon", "Receive snapshots for a store, without a mount");
  AddStoreOption(command, options->store);
  AddSnapshotOptions(command, options->snapshots);
  AddServiceOptions(command, options->request.log, options->request.metrics_listen,
                    options->service);
  command.body = [options, &command] { return StartDaemon(*options, command); };
}

}  // namespace ckptfs
