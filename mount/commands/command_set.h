// SPDX-License-Identifier: Apache-2.0
//
// The command line: one file per subcommand declares its options and its body.
//
// Thread safety: used by the process's first thread only.
// Lifetime: option values are shared by the body that reads them.

#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/store/store.h"
#include "mount/adoption.h"

namespace ckptfs {

// What a body returns: an error becomes a line on stderr and an exit code.
using CommandBody = std::function<Status()>;

class CommandSet {
 public:
  CommandSet();

  // A subcommand whose body runs when it was chosen.
  CLI::App* Add(const std::string& name, const std::string& description);
  void SetBody(CLI::App* command, CommandBody body);

  // The exit code of the chosen command.
  int Run(const std::vector<std::string>& words);
  CLI::App& app() { return app_; }

 private:
  CLI::App app_;
  CommandBody chosen_;
};

// Options that several commands share.
void AddStoreOption(CLI::App* command, std::string& store);
void AddJsonOption(CLI::App* command, bool& json);
void AddIngestOptions(CLI::App* command, IngestRequest& request);

// The store at `path` (empty: the default); kNotFound unless `create`.
Result<std::unique_ptr<Store>> OpenStore(const std::string& path, bool create);
// Its absolute path.
Result<std::string> StorePath(const std::string& path);

// An exit code a body has decided itself (mount's parent process, verify).
Status ExitWith(int code);

// Says what is wrong with a command line whose words are right one by one.
Status RefuseUsage(std::string_view message);

// A value that `parse` (string to Result) refuses makes the command line wrong.
template <class Parse>
CLI::Validator Checked(Parse parse) {
  return CLI::Validator(
      [parse](std::string& text) {
        const auto parsed = parse(text);
        return parsed ? std::string() : parsed.error().message;
      },
      "");
}

// Everything: parse, run, report.  Returns the process's exit code.
int RunCommandLine(std::vector<std::string> words);

// For tests: the whole command line, not run.
std::unique_ptr<CommandSet> MakeCommandSet();

void AddAdoptCommand(CommandSet& commands);
void AddExplainCommand(CommandSet& commands);
void AddExportCommand(CommandSet& commands);
void AddInfoCommand(CommandSet& commands);
void AddListCommand(CommandSet& commands);
void AddMountCommand(CommandSet& commands);
void AddRemoveCommand(CommandSet& commands);
void AddResolveCommand(CommandSet& commands);
void AddStatusCommand(CommandSet& commands);
void AddSwitchCommand(CommandSet& commands);
void AddUmountCommand(CommandSet& commands);
void AddVerifyCommand(CommandSet& commands);
void AddWarmCommand(CommandSet& commands);

}  // namespace ckptfs
