// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/command_set.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>

#include "core/base/strings.h"
#include "formats/sharding/name_pattern.h"
#include "mount/daemon.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

// ExitWith's errors: the text is the code.
constexpr std::string_view kExitPrefix = "\x01exit ";
constexpr std::string_view kHelpHint = "Run with --help for more information.";
constexpr size_t kTypingErrors = 2;  // between a word and the command that was meant

// The letters to insert, remove, replace or swap with their neighbour between
// two words (optimal string alignment).
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1,
                             cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

bool HasCommand(const CLI::App& app, std::string_view word) {
  const auto commands = app.get_subcommands(nullptr);
  return std::any_of(commands.begin(), commands.end(),
                     [&](const CLI::App* command) { return command->get_name() == word; });
}

// The commands that `word` may have meant, else all of them.
std::string Suggestion(const CLI::App& app, std::string_view word) {
  std::string near, all;
  for (const CLI::App* command : app.get_subcommands(nullptr)) {
    const std::string& name = command->get_name();
    all += StrCat(all.empty() ? "" : ", ", name);
    const bool meant =
        word.size() <= name.size() + kTypingErrors && EditDistance(word, name) <= kTypingErrors;
    if (meant) near += StrCat(near.empty() ? "" : ", ", name);
  }
  return near.empty() ? StrCat("there are ", all) : StrCat("do you mean ", near, "?");
}

int Report(const Status& status) {
  if (status) return static_cast<int>(ExitCode::kOk);
  const Error& error = status.error();
  if (error.message.starts_with(kExitPrefix)) {
    return std::stoi(error.message.substr(kExitPrefix.size()));
  }
  fmt::print(stderr, "ckptfs: {}\n", Printable(error.message));
  return static_cast<int>(ExitCodeOf(error.code));
}

// What was printed must have arrived: a full disk behind a redirection is a failure.
int FinishOutput(int code) {
  errno = 0;
  const bool failed_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !failed_before) return code;
  fmt::print(stderr, "ckptfs: standard output: {}\n",
             errno != 0 ? std::strerror(errno) : "not all of it could be written");
  return code == 0 ? static_cast<int>(ExitCode::kFailed) : code;
}

int Execute(std::vector<std::string> words) {
  auto translated = TranslateMountWords(std::move(words));
  if (!translated) {
    fmt::print(stderr, "ckptfs: {}\n", Printable(translated.error().message));
    return static_cast<int>(ExitCode::kUsage);
  }
  try {
    return MakeCommandSet()->Run(*translated);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ckptfs: {}\n", Printable(error.what()));
    return static_cast<int>(ExitCode::kFailed);
  }
}

void Configure(CLI::App& app) {
  app.set_version_flag("--version", StrCat("ckptfs ", CKPTFS_VERSION));
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return StrCat("ckptfs: ", Printable(error.what()), "\n", kHelpHint, "\n");
  });
}

CLI::Option* DeclareOption(const CommandOption& option, CLI::App& app) {
  return std::visit(
      [&](auto* target) {
        if constexpr (std::is_same_v<decltype(target), bool*>) {
          return app.add_flag(option.name, *target, option.help);
        } else {
          return app.add_option(option.name, *target, option.help);
        }
      },
      option.target);
}

// Makes the command one of the application's; chosen is its body if words name it.
void Declare(const Command& command, CLI::App& app, CommandBody& chosen) {
  CLI::App* declared = app.add_subcommand(command.name, command.description);
  for (const CommandOption& option : command.options) {
    CLI::Option* made = DeclareOption(option, *declared);
    made->required(option.required);
    if (!option.value.empty()) made->type_name(option.value);
    if (option.many() && !option.positional()) made->allow_extra_args(false);
    if (!option.excludes.empty()) made->excludes(option.excludes);
    if (option.check)
      made->check(CLI::Validator([&](std::string& text) { return option.check(text); }, ""));
  }
  declared->callback([&command, &chosen] { chosen = command.body; });
}

}  // namespace

int CommandSet::Run(const std::vector<std::string>& words) {
  CLI::App app("Shows training checkpoints as reconfigurable views.", "ckptfs");
  Configure(app);
  CommandBody chosen;
  for (const Command& command : commands_) Declare(command, app, chosen);
  if (!words.empty() && !words[0].starts_with('-') && !HasCommand(app, words[0])) {
    return Report(RefuseUsage(StrCat("no command '", words[0], "'; ", Suggestion(app, words[0]))));
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return static_cast<int>(code == 0 ? ExitCode::kOk : ExitCode::kUsage);
  }
  return chosen ? Report(chosen()) : static_cast<int>(ExitCode::kUsage);
}

void AddStoreOption(Command& command, std::string& store) {
  command
      .Add("--store", store,
           "Directory of the store (default: /var/lib/ckptfs for root, else "
           "the XDG data directory)")
      .Value("DIR");
}

void AddJsonOption(Command& command, bool& json) { command.Add("--json", json, "Print JSON"); }

void AddIngestOptions(Command& command, IngestRequest& request) {
  command.Add("--family", request.family, "Rules of a model family: a name or a TOML file")
      .Value("NAME|FILE");
  command.Add("--family-set", request.family_set, "A number the family's rules need (heads=32)")
      .Value("NAME=N")
      .Check(Checked(ParseFamilyVariable));
  command
      .Add("--replicated", request.replicated,
           "Parameters that are whole on every tensor-parallel rank")
      .Value("REGEX")
      .Check(Checked(NamePattern::Parse));
  command.Add("--averaged", request.averaged, "Parameters to average over tensor-parallel ranks")
      .Value("REGEX")
      .Check(Checked(NamePattern::Parse));
  command
      .Add("--parameter-order", request.parameter_order,
           "Names of the model's parameters in its order, one a line: for optimizers that number them")
      .Value("FILE");
  command.Add("--weights-only", request.weights_only,
              "Take a step whose optimizer files were removed");
}

void AddSnapshotOptions(Command& command, SnapshotFlags& flags) {
  command
      .Add("--snapshot-memory", flags.memory,
           "Memory for snapshots of training jobs; 0: none are received (default: a quarter of RAM)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  AddRetentionOptions(command, flags.request.retention);
  command
      .Add("--hot-steps", flags.request.hot_steps,
           "Keep the files of the newest K durable snapshots in memory (default: 0)")
      .Value("K")
      .Check(Checked(ParseCount));
  command
      .Add("--spool", flags.spool,
           "A directory of this machine's own disk for snapshots that the store does not take at once")
      .Value("DIR");
  command.Add("--spool-size", flags.spool_size, "Room for them (default: half of what is free there)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  command.Add("--hot-memory", flags.hot_memory, "Memory for them (default: an eighth of RAM)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
}

Result<SnapshotRequest> SnapshotRequestOf(const SnapshotFlags& flags) {
  SnapshotRequest request = flags.request;
  if (!flags.memory.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.memory_bytes, ParseBytes(flags.memory));
  }
  if (!flags.spool.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.spool, AbsolutePath(flags.spool));
  }
  if (!flags.spool_size.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.spool_bytes, ParseBytes(flags.spool_size));
  }
  if (!flags.hot_memory.empty()) {
    CKPT_ASSIGN_OR_RETURN(request.hot_bytes, ParseBytes(flags.hot_memory));
  }
  return request;
}

void AddRetentionOptions(Command& command, Retention& retention) {
  command.Add("--keep-last", retention.keep_last, "Of a run's steps, keep the newest N")
      .Value("N")
      .Check(Checked(ParsePositive));
  command
      .Add("--keep-every", retention.keep_every, "Keep those whose iteration is a multiple of M")
      .Value("M")
      .Check(Checked(ParsePositive));
}

Result<std::string> StorePath(const std::string& path) {
  return AbsolutePath(path.empty() ? DefaultStore() : path);
}

Result<std::unique_ptr<Store>> OpenStore(const std::string& path, bool create) {
  CKPT_ASSIGN_OR_RETURN(const std::string directory, StorePath(path));
  if (!create && !std::filesystem::exists(directory)) {
    return Fail(ErrorCode::kNotFound,
                StrCat("no store at ", directory, "; `ckptfs adopt PATH` makes one"));
  }
  return Store::Open(directory, create);
}

Status ExitWith(int code) {
  if (code == 0) return {};
  return Fail(ErrorCode::kIo, StrCat(kExitPrefix, code));
}

Status RunService(bool foreground, std::string& log, const ServiceBody& body) {
  if (foreground) {
    if (log.empty()) log = "stderr";
    return body([] {});
  }
  // The child says itself what went wrong: its parent only sees a code.
  return ExitWith(RunInBackground([&](const auto& ready) { return Report(body(ready)); }));
}

Status RefuseUsage(std::string_view message) {
  fmt::print(stderr, "ckptfs: {}\n{}\n", Printable(message), kHelpHint);
  return ExitWith(static_cast<int>(ExitCode::kUsage));
}

std::unique_ptr<CommandSet> MakeCommandSet() {
  auto commands = std::make_unique<CommandSet>();
  AddMountCommand(*commands);
  AddDaemonCommand(*commands);
  AddUmountCommand(*commands);
  AddAdoptCommand(*commands);
  AddListCommand(*commands);
  AddResolveCommand(*commands);
  AddSwitchCommand(*commands);
  AddWarmCommand(*commands);
  AddRemoveCommand(*commands);
  AddGcCommand(*commands);
  AddInfoCommand(*commands);
  AddExplainCommand(*commands);
  AddExportCommand(*commands);
  AddReadCommand(*commands);
  AddVerifyCommand(*commands);
  AddStatusCommand(*commands);
  return commands;
}

int RunCommandLine(std::vector<std::string> words) {
  return FinishOutput(Execute(std::move(words)));
}

}  // namespace ckptfs
