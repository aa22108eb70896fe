// SPDX-License-Identifier: Apache-2.0
//
// The command line: one file per subcommand declares its options and its body.
//
// Thread safety: used by the process's first thread only.
// Lifetime: option values are shared by the body that reads them.

#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/store/store.h"
#include "mount/commands/command.h"
#include "mount/daemon/adoption.h"
#include "mount/daemon/configuration.h"
#include "mount/daemon/snapshot_service.h"
#include "mount/logging.h"

namespace ckptfs {

class CommandSet {
 public:
  // A subcommand, for its options and its body to be filled in.
  Command& Add(std::string name, std::string description) {
    return commands_.emplace_back(Command{std::move(name), std::move(description), {}, {}});
  }
  const std::deque<Command>& commands() const { return commands_; }
  Command* Find(std::string_view name);  // null: there is none

  // The exit code of the chosen command.
  int Run(std::vector<std::string> words);
  // The values that the options of a command that was parsed (by another set, which may go) would
  // have now: its configuration file is read again.  REQUIRES: nothing was run.
  Result<OptionValues> ReadAgain(const Command& as);

 private:
  std::deque<Command> commands_;
};

// Options that several commands share.
void AddStoreOption(Command& command, std::string& store);
void AddJsonOption(Command& command, bool& json);
void AddIngestOptions(Command& command, IngestRequest& request);
// The same with the paths of files absolute, for a daemon.
Result<IngestRequest> AbsoluteIngest(IngestRequest request);
// The snapshot settings of a mount and of a daemon.
struct SnapshotFlags {
  SnapshotRequest request;
  std::string memory;
  std::string hot_memory;
  std::string spool;
  std::string spool_size;
  std::string peer_memory;
  std::string peer_rate;
  std::string protect;
};
void AddSnapshotOptions(Command& command, SnapshotFlags& flags);
Result<SnapshotRequest> SnapshotRequestOf(const SnapshotFlags& flags);
// --config, and what a daemon needs to read it again.
void AddConfigOption(Command& command, std::string& file);
ConfigurationRequest ConfigurationOf(const Command& command);
// The values that the options have.
OptionValues ValuesOfOptions(const Command& command);
// --log-format, and its value.
void AddLogFormatOption(Command& command, std::string& format);
Result<LogFormat> LogFormatOf(const std::string& format);
// --metrics-listen.
void AddMetricsOption(Command& command, std::string& address);

// How a command that stays as a daemon is run.
struct ServiceFlags {
  std::string log_format = {};
  bool foreground = false;
  std::string config = {};
};
// --log, --log-format, --metrics-listen, --foreground and --config.
void AddServiceOptions(Command& command, std::string& log, std::string& metrics_listen,
                       ServiceFlags& flags);

// --mkdir and --nonempty.
void AddMountpointOptions(Command& command, bool& mkdir, bool& nonempty);
// --keep-last and --keep-every.
void AddRetentionOptions(Command& command, Retention& retention);

// The store at `path` (empty: the default); kNotFound unless `create`.
Result<std::unique_ptr<Store>> OpenStore(const std::string& path, bool create);
// Its absolute path.
Result<std::string> StorePath(const std::string& path);

// Runs a daemon's body, which calls `ready` once it serves: in the background unless
// `foreground`, where an empty `log` becomes stderr.
using ServiceBody = std::function<Status(const std::function<void()>& ready)>;
Status RunService(bool foreground, std::string& log, const ServiceBody& body);

// An exit code a body has decided itself (mount's parent process, verify).
Status ExitWith(int code);

// An error in a command line whose words are right one by one; the command's body
// returns it.
Status RefuseUsage(std::string_view message);

// The command as it was given, to be typed again in any directory: what was left out stays so,
// paths are absolute, the store (absolute) is named, and it goes into the background.
std::string CommandAgain(const Command& command, const std::string& store);
// The same for execve, from the command's name on.
std::vector<std::string> WordsAgain(const Command& command, const std::string& store);

// Everything: parse, run, report.  Returns the process's exit code.
int RunCommandLine(std::vector<std::string> words);

// The script by which a shell ("bash", "zsh" or "fish") completes the command line.
std::string CompletionScript(const CommandSet& commands, const std::string& shell);

// For tests: the whole command line, not run.
std::unique_ptr<CommandSet> MakeCommandSet();

void AddUpgradeCommand(CommandSet& commands);
void AddAdoptCommand(CommandSet& commands);
void AddCompletionsCommand(CommandSet& commands);
void AddConfigCommand(CommandSet& commands);
void AddDaemonCommand(CommandSet& commands);
void AddDiffCommand(CommandSet& commands);
void AddExplainCommand(CommandSet& commands);
void AddExportCommand(CommandSet& commands);
void AddGcCommand(CommandSet& commands);
void AddIngestCommand(CommandSet& commands);
void AddInfoCommand(CommandSet& commands);
void AddListCommand(CommandSet& commands);
void AddLsCommand(CommandSet& commands);
void AddMapCommand(CommandSet& commands);
void AddMountCommand(CommandSet& commands);
void AddProtectCommand(CommandSet& commands);
void AddReadCommand(CommandSet& commands);
void AddRedundancyCommand(CommandSet& commands);
void AddCompactCommand(CommandSet& commands);
void AddTagCommand(CommandSet& commands);
void AddRenameCommand(CommandSet& commands);
void AddRemoveCommand(CommandSet& commands);
void AddResolveCommand(CommandSet& commands);
void AddRecoverCommand(CommandSet& commands);
void AddStatsCommand(CommandSet& commands);
void AddStatusCommand(CommandSet& commands);
void AddSwitchCommand(CommandSet& commands);
void AddTopCommand(CommandSet& commands);
void AddUmountCommand(CommandSet& commands);
void AddVerifyCommand(CommandSet& commands);
void AddWarmCommand(CommandSet& commands);

}  // namespace ckptfs
