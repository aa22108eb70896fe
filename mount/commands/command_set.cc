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
#include <set>

#include "core/base/edit_distance.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "formats/sharding/name_pattern.h"
#include "mount/commands/config_file.h"
#include "mount/commands/step_access.h"
#include "mount/commands/usage_errors.h"
#include "mount/control/step_json.h"
#include "mount/daemon/daemon.h"
#include "mount/daemon/mount_handover.h"
#include "mount/metrics/metrics_server.h"
#include "mount/options.h"
#include "mount/printable.h"
#include "snapshot/receive/descriptor_store.h"

namespace ckptfs {
namespace {

// ExitWith's errors: the text is the code.
constexpr std::string_view kExitPrefix = "\x01exit ";
constexpr std::string_view kUsagePrefix = "\x01usage ";  // RefuseUsage's
constexpr std::string_view kHelpHint = "Run with --help for more information.";

bool HasCommand(const CLI::App& app, std::string_view word) {
  const auto commands = app.get_subcommands(nullptr);
  return std::any_of(commands.begin(), commands.end(),
                     [&](const CLI::App* command) { return command->get_name() == word; });
}

int Report(const Status& status) {
  if (status) return static_cast<int>(ExitCode::kOk);
  const Error& error = status.error();
  if (error.message.starts_with(kExitPrefix)) {
    return std::stoi(error.message.substr(kExitPrefix.size()));
  }
  if (error.message.starts_with(kUsagePrefix)) {
    fmt::print(stderr, "ckptfs: {}\n{}\n",
               Printable(std::string_view(error.message).substr(kUsagePrefix.size())), kHelpHint);
    return static_cast<int>(ExitCode::kUsage);
  }
  fmt::print(stderr, "ckptfs: {}\n", Printable(error.message));
  return static_cast<int>(ExitCodeOf(error.code));
}

// The JSON of an error for --json; nothing for an exit code alone.
void PrintErrorJson(const Error& error) {
  if (error.message.starts_with(kExitPrefix)) return;
  const bool usage = error.message.starts_with(kUsagePrefix);
  Error said = error;
  if (usage) said.message.erase(0, kUsagePrefix.size());
  nlohmann::json json = ErrorJson(said);
  if (usage) json["code"] = "usage";
  PrintJson({{"error", json}});
}

// The printed text must have arrived: a full disk behind a redirection is a failure.
int FinishOutput(int code) {
  errno = 0;
  const bool failed_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !failed_before) return code;
  fmt::print(stderr, "ckptfs: standard output: {}\n",
             errno != 0 ? std::strerror(errno) : "not all of it could be written");
  return code == 0 ? static_cast<int>(ExitCode::kFailed) : code;
}

// `mount -o` may say all that the subcommand takes, but for the store, which is mount(8)'s
// source, and --foreground, since mount(8) waits for the command's end.
MountOptions MountOptionsOf(const CommandSet& commands) {
  MountOptions options;
  for (const Command& command : commands.commands()) {
    if (command.name != "mount") continue;
    for (const CommandOption& option : command.options) {
      if (option.positional() || option.name == "--store" || option.name == "--foreground")
        continue;
      options[option.name.substr(2)] = !std::holds_alternative<bool*>(option.target);
    }
  }
  return options;
}

int Execute(std::vector<std::string> words) {
  try {
    const auto commands = MakeCommandSet();
    const auto translated = TranslateMountWords(std::move(words), MountOptionsOf(*commands));
    if (translated) return commands->Run(*translated);
    fmt::print(stderr, "ckptfs: {}\n", Printable(translated.error().message));
    return static_cast<int>(ExitCode::kUsage);
  } catch (const std::exception& error) {
    fmt::print(stderr, "ckptfs: {}\n", Printable(error.what()));
    return static_cast<int>(ExitCode::kFailed);
  }
}

void Configure(CLI::App& app) {
  app.set_version_flag("-V,--version", StrCat("ckptfs ", CKPTFS_VERSION));
  app.require_subcommand(1);
  app.footer(
      "Recipes for DeepSpeed, Trainer, accelerate, Lightning, FSDP and Megatron: recipes.md, "
      "installed in share/doc/ckptfs.  The manual: man ckptfs.");
  app.get_formatter()->column_width(34);
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

// The names of the options that stand on the line.
std::set<std::string> GivenOptions(const Command& command, const CLI::App& app) {
  std::set<std::string> given;
  const CLI::App* const parsed = app.get_subcommand(command.name);
  for (const CommandOption& option : command.options) {
    if (parsed->get_option(option.name)->count() != 0) given.insert(option.name);
  }
  return given;
}

// Reads the file of --config, if it is given.
Status ReadConfig(Command& command, const CLI::App& app) {
  const auto option = std::ranges::find(command.options, "--config", &CommandOption::name);
  if (option == command.options.end()) return {};
  const std::string& text = **std::get_if<std::string*>(&option->target);
  if (text.empty()) return {};
  if (command.config.empty()) {  // else it is read again, and its path is known
    CKPT_ASSIGN_OR_RETURN(command.config, ConfigPath(text));
  }
  CKPT_ASSIGN_OR_RETURN(const std::string file, ReadConfigText(command.config));
  const auto errors = ApplyConfig(file, command.config, GivenOptions(command, app), command);
  if (errors.empty()) return {};
  std::string all;
  for (const std::string& error : errors) all += StrCat(all.empty() ? "" : "\n", error);
  return RefuseUsage(all);
}

}  // namespace

Command* CommandSet::Find(std::string_view name) {
  const auto found = std::ranges::find(commands_, name, &Command::name);
  return found == commands_.end() ? nullptr : &*found;
}

int CommandSet::Run(std::vector<std::string> words) {
  CLI::App app("Shows training checkpoints as reconfigurable views.", "ckptfs");
  Configure(app);
  CommandBody chosen;
  for (const Command& command : commands_) Declare(command, app, chosen);
  if (!words.empty() && words[0] == "help") {  // `help COMMAND` is `COMMAND --help`
    words.erase(words.begin());
    words.insert(words.begin() + (words.empty() ? 0 : 1), "--help");
  }
  const std::string command = words.empty() ? "" : words[0];
  const bool json = std::find(words.begin(), words.end(), "--json") != words.end();
  const auto finish = [&](const Status& done) {
    if (json && !done) PrintErrorJson(done.error());
    return Report(done);
  };
  if (!command.empty() && !command.starts_with('-') && !HasCommand(app, command)) {
    return finish(RefuseUsage(WhyNoCommand(commands_, command)));
  }
  if (command.starts_with("--") && command != "--help" && command != "--version") {
    return finish(RefuseUsage(WhyNotInFront(commands_, words)));
  }
  Command* const meant = Find(command);
  if (const std::string unknown = meant == nullptr ? "" : UnknownOption(*meant, words);
      !unknown.empty()) {
    return finish(RefuseUsage(WhyExtra(*meant, unknown)));
  }
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ExtrasError&) {
    const auto parsed = app.get_subcommands();
    const auto extras = parsed.empty() ? app.remaining() : parsed.front()->remaining();
    const std::string extra = extras.empty() ? "" : extras.front();
    return finish(
        RefuseUsage(meant == nullptr ? WhyNoCommand(commands_, extra) : WhyExtra(*meant, extra)));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) {
      const std::string missing =
          meant == nullptr ? "" : WhyMissing(*meant, GivenOptions(*meant, app));
      return finish(RefuseUsage(missing.empty() ? error.what() : missing));
    }
    return app.exit(error);  // prints what was asked for: help, the version
  }
  if (!chosen) return static_cast<int>(ExitCode::kUsage);
  meant->words = words;  // it was chosen by its name
  const Status read = ReadConfig(*meant, app);
  return finish(read ? chosen() : read);
}

Result<OptionValues> CommandSet::ReadAgain(const Command& as) {
  CLI::App app;
  Configure(app);
  CommandBody chosen;
  for (const Command& command : commands_) Declare(command, app, chosen);
  const auto parsed = Caught([&]() -> Status {
    app.parse(std::vector<std::string>(as.words.rbegin(), as.words.rend()));
    return {};
  });
  if (!parsed) return Fail(Error(parsed.error()));
  Command& named = *Find(as.name);
  named.config = as.config;
  const Status read = ReadConfig(named, app);
  if (read) return ValuesOfOptions(named);
  Error error = read.error();
  if (error.message.starts_with(kUsagePrefix)) error.message.erase(0, kUsagePrefix.size());
  return Fail(std::move(error));
}

void AddStoreOption(Command& command, std::string& store) {
  command
      .Add("--store", store,
           "Directory of the store (default: $CKPTFS_STORE, else /var/lib/ckptfs for root, "
           "else the XDG data directory)")
      .Value("DIR");
}

void AddJsonOption(Command& command, bool& json) { command.Add("--json", json, "Print JSON"); }

void AddIngestOptions(Command& command, IngestRequest& request) {
  command.Add("--family", request.family, "Rules of a model family: a name or a TOML file")
      .Value("NAME|FILE");
  command.Add("--family-set", request.family_set, "A number the family's rules need (heads=32)")
      .Value("NAME=N")
      .Check(Checked(ParseFamilyVariable));
  AddModelFilesOption(command, request.hf_config);
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
           "Names of the optimizer's parameters in its order, group by group, one a line")
      .Value("FILE");
  command
      .Add("--model", request.model,
           "The key of the model in a torch file or DCP directory that holds several state dicts")
      .Value("KEY");
  command.Add("--weights-only", request.weights_only,
              "Take a step whose optimizer files were removed");
}

// Refuses, by name, a scheme that is only planned with.
Result<ProtectScheme> ParseProtect(const std::string& text) {
  CKPT_ASSIGN_OR_RETURN(const ProtectScheme scheme, ProtectScheme::Parse(text));
  if (scheme.kind != ProtectScheme::kLocal) return scheme;
  return Fail(ErrorCode::kUnsupported,
              StrCat("'", text, "': off, copy, copy:N or ec:K+M; this build has no local copies"));
}

void AddPeerOptions(Command& command, SnapshotFlags& flags) {
  command
      .Add("--peer", flags.request.peers.address,
           "Where daemons of other machines reach this one; steps are then kept in their memory, "
           "too")
      .Value("HOST[:PORT]")
      .Check(Checked(ParseTcpAddress));
  command
      .Add("--peer-memory", flags.peer_memory,
           "Memory for parts of steps, others' and own (default: a quarter of RAM)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  command
      .Add("--peer-rate", flags.peer_rate,
           "Bytes a second to a peer, at most; 0: as fast as the link takes them (default)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  command
      .Add("--protect", flags.protect,
           "How other nodes hold what the ranks here save: as copies, or as units of an erasure "
           "code "
           "(default: off)")
      .Value("off|copy|copy:N|ec:K+M")
      .Check(Checked(ParseProtect));
  command
      .Add("--failure-domain", flags.request.peers.failure_domain,
           "What dies together, a rack say: copies go to others (default: the host)")
      .Value("TEXT");
}

void AddSnapshotOptions(Command& command, SnapshotFlags& flags) {
  command
      .Add("--snapshot-memory", flags.memory,
           "Memory for snapshots of training jobs; 0 receives none (default: a quarter of RAM)")
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
           "A directory of this machine's own disk for snapshots that the store does not take at "
           "once")
      .Value("DIR");
  command
      .Add("--spool-size", flags.spool_size,
           "Room for these snapshots (default: half of what "
           "is free there)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  command.Add("--hot-memory", flags.hot_memory, "Memory for hot steps (default: an eighth of RAM)")
      .Value("BYTES")
      .Check(Checked(ParseBytes));
  AddPeerOptions(command, flags);
}

Result<PeerRequest> PeerRequestOf(const SnapshotFlags& flags) {
  PeerRequest peers = flags.request.peers;
  if (!flags.protect.empty()) {
    CKPT_ASSIGN_OR_RETURN(peers.scheme, ParseProtect(flags.protect));
  }
  if (!flags.peer_memory.empty()) {
    CKPT_ASSIGN_OR_RETURN(peers.memory_bytes, ParseBytes(flags.peer_memory));
  }
  if (!flags.peer_rate.empty()) {
    CKPT_ASSIGN_OR_RETURN(peers.rate, ParseBytes(flags.peer_rate));
  }
  if (peers.address.empty() && peers.scheme.kind != ProtectScheme::kOff) {
    return Fail(
        RefuseUsage("--protect needs --peer: the address at which other daemons reach this one")
            .error());
  }
  return peers;
}

Result<SnapshotRequest> SnapshotRequestOf(const SnapshotFlags& flags) {
  SnapshotRequest request = flags.request;
  CKPT_ASSIGN_OR_RETURN(request.peers, PeerRequestOf(flags));
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

Result<IngestRequest> AbsoluteIngest(IngestRequest ingest) {
  const bool file =
      ingest.family.find('/') != std::string::npos || ingest.family.ends_with(".toml");
  for (std::string* path :
       {&ingest.hf_config, &ingest.parameter_order, file ? &ingest.family : nullptr}) {
    if (path == nullptr || path->empty()) continue;
    CKPT_ASSIGN_OR_RETURN(*path, AbsolutePath(*path));
  }
  return ingest;
}

void AddConfigOption(Command& command, std::string& file) {
  command
      .Add("--config", file,
           "Options that this line does not say come from there; NAME is /etc/ckptfs/NAME.toml")
      .Value("FILE|NAME")
      .LineOnly();
}

void AddLogFormatOption(Command& command, std::string& format) {
  command.Add("--log-format", format, "How lines of the log look (default: text)")
      .Value("text|json")
      .Check(Checked(ParseLogFormat));
}

Result<LogFormat> LogFormatOf(const std::string& format) {
  return format.empty() ? LogFormat::kText : ParseLogFormat(format);
}

void AddMetricsOption(Command& command, std::string& address) {
  command
      .Add("--metrics-listen", address,
           "Answer GET /metrics there, for Prometheus; a PORT alone is one of 127.0.0.1")
      .Value("ADDR")
      .Check(Checked(ParseMetricsAddress));
}

void AddServiceOptions(Command& command, std::string& log, std::string& metrics_listen,
                       ServiceFlags& flags) {
  command.Add("--log", log, "Where the daemon logs (default: log/ in the store)")
      .Value("FILE|syslog|stderr");
  AddLogFormatOption(command, flags.log_format);
  AddMetricsOption(command, metrics_listen);
  command.Add("--foreground", flags.foreground, "Stay in the foreground; log to stderr");
  AddConfigOption(command, flags.config);
}

void AddMountpointOptions(Command& command, bool& mkdir, bool& nonempty) {
  command.Add("--mkdir", mkdir, "Make the mount point if it is missing");
  command.Add("--nonempty", nonempty, "Mount over a directory that has files in it");
}

void AddRetentionOptions(Command& command, Retention& retention) {
  command.Add("--keep-last", retention.keep_last, "Keep the newest N steps of a run")
      .Value("N")
      .Check(Checked(ParsePositive));
  command
      .Add("--keep-every", retention.keep_every,
           "Keep the steps whose iteration is a multiple "
           "of M")
      .Value("M")
      .Check(Checked(ParsePositive));
}

Result<std::string> StorePath(const std::string& path) {
  return AbsolutePath(path.empty() ? DefaultStore() : path);
}

Result<std::unique_ptr<Store>> OpenStore(const std::string& path, bool create) {
  CKPT_ASSIGN_OR_RETURN(const std::string directory, StorePath(path));
  if (!create && !std::filesystem::exists(directory)) {
    return Fail(Error{ErrorCode::kNotFound, StrCat("no store at ", directory)}.Needing(
        "`ckptfs adopt PATH` makes one"));
  }
  return Store::Open(directory, create);
}

Status ExitWith(int code) {
  if (code == 0) return {};
  return Fail(ErrorCode::kIo, StrCat(kExitPrefix, code));
}

Status RunService(bool foreground, std::string& log, const ServiceBody& body) {
  // An earlier program of this process went into the background, if it was to.
  if (foreground || IsMountLeft()) {
    if (foreground && log.empty()) log = "stderr";
    return body([] {
      if (const auto manager = DescriptorStore::Find()) manager->SayReady();
    });
  }
  // The child says itself what went wrong: its parent only sees a code.
  return ExitWith(RunInBackground([&](const auto& ready) { return Report(body(ready)); }));
}

Status RefuseUsage(std::string_view message) {
  return Fail(ErrorCode::kInvalid, StrCat(kUsagePrefix, message));
}

std::unique_ptr<CommandSet> MakeCommandSet() {
  auto commands = std::make_unique<CommandSet>();
  AddMountCommand(*commands);
  AddDaemonCommand(*commands);
  AddIngestCommand(*commands);
  AddUmountCommand(*commands);
  AddAdoptCommand(*commands);
  AddListCommand(*commands);
  AddResolveCommand(*commands);
  AddRecoverCommand(*commands);
  AddSwitchCommand(*commands);
  AddWarmCommand(*commands);
  AddUpgradeCommand(*commands);
  AddCompactCommand(*commands);
  AddTagCommand(*commands);
  AddRenameCommand(*commands);
  AddRemoveCommand(*commands);
  AddGcCommand(*commands);
  AddInfoCommand(*commands);
  AddLsCommand(*commands);
  AddStatsCommand(*commands);
  AddDiffCommand(*commands);
  AddRedundancyCommand(*commands);
  AddMapCommand(*commands);
  AddExplainCommand(*commands);
  AddExportCommand(*commands);
  AddReadCommand(*commands);
  AddVerifyCommand(*commands);
  AddProtectCommand(*commands);
  AddStatusCommand(*commands);
  AddTopCommand(*commands);
  AddConfigCommand(*commands);
  AddCompletionsCommand(*commands);
  return commands;
}

int RunCommandLine(std::vector<std::string> words) {
  return FinishOutput(Execute(std::move(words)));
}

}  // namespace ckptfs
