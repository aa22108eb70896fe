// SPDX-License-Identifier: Apache-2.0

#include <memory>
#include <string>

#include "core/base/names.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/daemon/ingest_process.h"
#include "mount/fuse/mount_table.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

struct IngestFlags {
  IngestMountRequest request;
  std::string directory;
  IngestRequest ingest;
  bool link = false;
  bool copy = false;
  bool streamed = false;
  ServiceFlags service;
};

// Relative paths end here: the daemon's working directory is /.
Result<IngestMountRequest> RequestOf(const IngestFlags& options) {
  IngestMountRequest request = options.request;
  CKPT_ASSIGN_OR_RETURN(request.store, StorePath(request.store));
  CKPT_ASSIGN_OR_RETURN(request.mountpoint, MountpointPath(request.mountpoint));
  CKPT_ASSIGN_OR_RETURN(request.adopt.ingest, AbsoluteIngest(options.ingest));
  CKPT_ASSIGN_OR_RETURN(request.adopt.ingest.path, AbsolutePath(options.directory));
  if (options.link) request.adopt.ownership = Ownership::kLink;
  if (options.copy) request.adopt.ownership = Ownership::kCopy;
  request.passthrough = !options.streamed;
  request.log = AbsoluteLog(request.log);
  CKPT_ASSIGN_OR_RETURN(request.log_format, LogFormatOf(options.service.log_format));
  return request;
}

Status RunIngest(const IngestFlags& options, const Command& command) {
  CKPT_ASSIGN_OR_RETURN(IngestMountRequest request, RequestOf(options));
  request.again = CommandAgain(command, request.store);
  request.configuration = ConfigurationOf(command);
  return RunService(options.service.foreground, request.log,
                    [&](const auto& ready) { return RunIngest(request, ready); });
}

}  // namespace

void AddIngestCommand(CommandSet& commands) {
  auto options = std::make_shared<IngestFlags>();
  Command& command =
      commands.Add("ingest", "Mount a directory for jobs to save into; each whole step is adopted");
  command.Add("DIR", options->directory, "The directory of the disk that gets the files")
      .Required();
  command.Add("MOUNTPOINT", options->request.mountpoint, "Where jobs save").Required();
  AddStoreOption(command, options->request.store);
  command.Add("--name", options->request.adopt.name, "Name of the run that is adopted")
      .Value("RUN")
      .Check(Checked([](const std::string& name) { return CheckName(name, "run"); }));
  command.Add("--link", options->link, "Adopt as `adopt --link` does");
  command.Add("--copy", options->copy, "Adopt as `adopt --copy` does").Excludes("--link");
  AddIngestOptions(command, options->ingest);
  command.Add("--no-passthrough", options->streamed,
              "Write files through the daemon though the kernel could write them itself");
  AddThreadsOption(command, options->request.threads, "Threads that answer requests");
  AddMountpointOptions(command, options->request.mkdir, options->request.nonempty);
  AddServiceOptions(command, options->request.log, options->request.metrics_listen,
                    options->service);
  command.body = [options, &command] { return RunIngest(*options, command); };
}

}  // namespace ckptfs
