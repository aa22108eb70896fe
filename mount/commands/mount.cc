// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "core/base/names.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/daemon/mount_process.h"
#include "mount/fuse/mount_table.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

struct MountFlags {
  MountRequest request;
  std::vector<std::string> paths;  // checkpoints, and the mount point last
  std::vector<std::string> adopt;
  IngestRequest ingest;  // of each that is adopted, but for its path
  std::string name;
  bool link = false;
  bool copy = false;
  std::vector<std::string> layouts;
  std::vector<std::string> roots;
  std::string run;
  std::string step;
  std::string mode;
  std::string budget;
  std::string reserve;
  SnapshotFlags snapshots;
  ServiceFlags service;
  // A file says these in the place of the paths:
  std::string file_mountpoint;
  std::vector<std::string> file_checkpoints;
};

// The checkpoints and, last, the mount point: those of the line, and what they leave open, of the
// file.
std::vector<std::string> PathsOf(const MountFlags& options) {
  std::vector<std::string> paths = options.paths;
  if (paths.empty() && !options.file_mountpoint.empty()) paths = {options.file_mountpoint};
  if (paths.size() != 1) return paths;
  paths.insert(paths.begin(), options.file_checkpoints.begin(), options.file_checkpoints.end());
  return paths;
}

Result<ServingMode> ParseMode(const std::string& text) {
  for (const ServingMode mode :
       {ServingMode::kStream, ServingMode::kMaterialise, ServingMode::kDirect}) {
    if (ServingModeName(mode) == text) return mode;
  }
  return Fail(ErrorCode::kInvalid, StrCat("'", text, "': stream, materialise or direct"));
}

// A store is told by its option.
Status CheckCheckpoint(const std::string& path) {
  std::error_code error;
  const std::filesystem::path directory = path;
  const bool store = std::filesystem::exists(directory / "format", error) &&
                     std::filesystem::exists(directory / "manifests", error);
  if (!store) return {};
  return Fail(
      ErrorCode::kInvalid,
      StrCat(path, " is a store, not a checkpoint; do you mean --store ", ShellWord(path), "?"));
}

// Relative paths end here: the daemon's working directory is /.
Result<MountRequest> RequestOf(const MountFlags& options) {
  MountRequest request = options.request;
  CKPT_ASSIGN_OR_RETURN(request.store, StorePath(request.store));
  std::vector<std::string> paths = PathsOf(options);
  CKPT_ASSIGN_OR_RETURN(request.mountpoint, MountpointPath(paths.back()));
  paths.pop_back();
  CKPT_ASSIGN_OR_RETURN(const IngestRequest ingest, AbsoluteIngest(options.ingest));
  for (const std::string& path : paths) CKPT_RETURN_IF_ERROR(CheckCheckpoint(path));
  paths.insert(paths.end(), options.adopt.begin(), options.adopt.end());
  for (const std::string& path : paths) {
    AdoptRequest adopt;
    adopt.ingest = ingest;
    CKPT_ASSIGN_OR_RETURN(adopt.ingest.path, AbsolutePath(path));
    adopt.ingest.link = LinkPath(path);
    adopt.name = options.name;
    if (options.link) adopt.ownership = Ownership::kLink;
    if (options.copy) adopt.ownership = Ownership::kCopy;
    request.adopt.push_back(std::move(adopt));
  }
  for (const std::string& text : options.layouts) {
    CKPT_ASSIGN_OR_RETURN(Layout layout, Layout::Parse(text));
    request.layouts.push_back(std::move(layout));
  }
  CKPT_ASSIGN_OR_RETURN(request.roots, ParseRoots(options.roots));
  CKPT_ASSIGN_OR_RETURN(request.models, GivenModelFiles(ingest.hf_config));
  request.hf_config = ingest.hf_config;
  if (!options.run.empty()) request.run = options.run;
  if (!options.step.empty()) request.step = options.step;
  if (!options.mode.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.mode, ParseMode(options.mode));
  }
  if (!options.budget.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.budget_bytes, ParseBytes(options.budget));
  }
  if (!options.reserve.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.reserve_bytes, ParseBytes(options.reserve));
  }
  CKPT_ASSIGN_OR_RETURN(request.snapshots, SnapshotRequestOf(options.snapshots));
  request.log = AbsoluteLog(request.log);
  CKPT_ASSIGN_OR_RETURN(request.log_format, LogFormatOf(options.service.log_format));
  request.allow_other = request.allow_other || ::geteuid() == 0;
  return request;
}

Status RunMount(const MountFlags& options, const Command& command) {
  if (options.request.follow && !options.step.empty() && options.step != "latest") {
    return RefuseUsage("--follow shows the latest step, but --step " + options.step +
                       " shows another one: give one of them");
  }
  if (PathsOf(options).empty()) return RefuseUsage("MOUNTPOINT is required");
  CKPT_ASSIGN_OR_RETURN(MountRequest request, RequestOf(options));
  request.again = CommandAgain(command, request.store);
  request.words = WordsAgain(command, request.store);
  request.configuration = ConfigurationOf(command);
  return RunService(options.service.foreground, request.log,
                    [&](const auto& ready) { return RunMount(request, ready); });
}

void AddServingOptions(Command& command, MountFlags& options) {
  command.Add("--mode", options.mode, "How to serve files (default: chosen per file)")
      .Value("stream|materialise|direct")
      .Check(Checked(ParseMode));
  command
      .Add("--budget", options.budget, "Memory for materialised files (default: a quarter of RAM)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  command
      .Add("--reserve", options.reserve,
           "The part of --budget to keep ready for the next files (default: a third, at most 8G)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  AddSnapshotOptions(command, options.snapshots);
  command
      .Add("--read-ahead", options.request.read_ahead_kib,
           "The kernel's read-ahead for the mount; 0 leaves it (default: 16384)")
      .Value("KIB")
      .Check(Checked(ParseCount));
  AddThreadsOption(command, options.request.threads, "Threads that answer requests");
  command.Add("--clone-fd", options.request.clone_fd, "A kernel queue per thread");
}

}  // namespace

void AddMountCommand(CommandSet& commands) {
  auto options = std::make_shared<MountFlags>();
  Command& command = commands.Add("mount", "Mount a store; returns when the mount answers");
  command.Add("PATH", options->paths,
              "[CHECKPOINT...] MOUNTPOINT: checkpoints to adopt first, and an existing directory");
  AddStoreOption(command, options->request.store);
  command.Add("--adopt", options->adopt, "Adopt a checkpoint first").Value("PATH");
  command.Add("--name", options->name, "Name of the run that is adopted")
      .Value("RUN")
      .Check(Checked([](const std::string& name) { return CheckName(name, "run"); }));
  command.Add("--link", options->link, "Adopt as `adopt --link` does");
  command.Add("--copy", options->copy, "Adopt as `adopt --copy` does").Excludes("--link");
  command.Add("--run", options->run, "The run /view shows").Value("RUN");
  command.Add("--step", options->step, "The step /view shows (default: latest)").Value("ID|latest");
  command.Add("--follow", options->request.follow,
              "Move /view when a newer step appears; adopt "
              "the steps of CHECKPOINT as a job saves them");
  command.Add("--layout", options->layouts, "A layout that listings show")
      .Value("LAYOUT")
      .Check(Checked(Layout::Parse));
  AddRootOption(command, options->roots);
  AddIngestOptions(command, options->ingest);
  AddServingOptions(command, *options);
  command.Add("--allow-other", options->request.allow_other,
              "Let other users in (always for root)");
  AddMountpointOptions(command, options->request.mkdir, options->request.nonempty);
  AddServiceOptions(command, options->request.log, options->request.metrics_listen,
                    options->service);
  command.AddToFile("--mountpoint", options->file_mountpoint).Value("DIR");
  command.AddToFile("--checkpoint", options->file_checkpoints).Value("PATH");
  command.body = [options, &command] { return RunMount(*options, command); };
}

}  // namespace ckptfs
