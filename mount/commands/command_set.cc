// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/command_set.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>

#include "core/base/strings.h"
#include "formats/deepspeed/name_pattern.h"
#include "mount/options.h"

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
    const bool meant = word.size() <= name.size() + kTypingErrors &&
                       EditDistance(word, name) <= kTypingErrors;
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
  std::fprintf(stderr, "ckptfs: %s\n", error.message.c_str());
  return static_cast<int>(ExitCodeOf(error.code));
}

// What was printed must have arrived: a full disk behind a redirection is a failure.
int FinishOutput(int code) {
  errno = 0;
  const bool failed_before = std::ferror(stdout) != 0;
  if (std::fflush(stdout) == 0 && !failed_before) return code;
  std::fprintf(stderr, "ckptfs: standard output: %s\n",
               errno != 0 ? std::strerror(errno) : "not all of it could be written");
  return code == 0 ? static_cast<int>(ExitCode::kFailed) : code;
}

int Execute(std::vector<std::string> words) {
  auto translated = TranslateMountWords(std::move(words));
  if (!translated) {
    std::fprintf(stderr, "ckptfs: %s\n", translated.error().message.c_str());
    return static_cast<int>(ExitCode::kUsage);
  }
  try {
    return MakeCommandSet()->Run(*translated);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ckptfs: %s\n", error.what());
    return static_cast<int>(ExitCode::kFailed);
  }
}

}  // namespace

CommandSet::CommandSet()
    : app_("Shows training checkpoints as reconfigurable views.", "ckptfs") {
  app_.set_version_flag("--version", StrCat("ckptfs ", CKPTFS_VERSION));
  app_.require_subcommand(1);
  app_.get_formatter()->column_width(34);
  app_.failure_message([](const CLI::App*, const CLI::Error& error) {
    return StrCat("ckptfs: ", std::string(error.what()), "\n", kHelpHint, "\n");
  });
}

CLI::App* CommandSet::Add(const std::string& name, const std::string& description) {
  return app_.add_subcommand(name, description);
}

void CommandSet::SetBody(CLI::App* command, CommandBody body) {
  command->callback([this, body = std::move(body)] { chosen_ = body; });
}

int CommandSet::Run(const std::vector<std::string>& words) {
  if (!words.empty() && !words[0].starts_with('-') && !HasCommand(app_, words[0])) {
    return Report(RefuseUsage(
        StrCat("no command '", words[0], "'; ", Suggestion(app_, words[0]))));
  }
  try {
    app_.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    const int code = app_.exit(error);
    return static_cast<int>(code == 0 ? ExitCode::kOk : ExitCode::kUsage);
  }
  return chosen_ ? Report(chosen_()) : static_cast<int>(ExitCode::kUsage);
}

void AddStoreOption(CLI::App* command, std::string& store) {
  command->add_option("--store", store,
                      "Directory of the store (default: /var/lib/ckptfs for root, else "
                      "the XDG data directory)")
      ->type_name("DIR");
}

void AddJsonOption(CLI::App* command, bool& json) {
  command->add_flag("--json", json, "Print JSON");
}

void AddIngestOptions(CLI::App* command, IngestRequest& request) {
  command->add_option("--family", request.family, "Rules of a model family: a name or a TOML file")
      ->type_name("NAME|FILE");
  command
      ->add_option("--family-set", request.family_set,
                   "A number the family's rules need (heads=32)")
      ->type_name("NAME=N")
      ->check(Checked(ParseFamilyVariable))
      ->allow_extra_args(false);
  command
      ->add_option("--replicated", request.replicated,
                   "Parameters that are whole on every tensor-parallel rank")
      ->type_name("REGEX")
      ->check(Checked(deepspeed::NamePattern::Parse))
      ->allow_extra_args(false);
  command
      ->add_option("--averaged", request.averaged,
                   "Parameters to average over tensor-parallel ranks")
      ->type_name("REGEX")
      ->check(Checked(deepspeed::NamePattern::Parse))
      ->allow_extra_args(false);
  command->add_flag("--weights-only", request.weights_only,
                    "Take a step whose optimizer files were removed");
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

Status RefuseUsage(std::string_view message) {
  std::fprintf(stderr, "ckptfs: %s\n%s\n", std::string(message).c_str(), kHelpHint.data());
  return ExitWith(static_cast<int>(ExitCode::kUsage));
}

std::unique_ptr<CommandSet> MakeCommandSet() {
  auto commands = std::make_unique<CommandSet>();
  AddMountCommand(*commands);
  AddUmountCommand(*commands);
  AddAdoptCommand(*commands);
  AddListCommand(*commands);
  AddResolveCommand(*commands);
  AddSwitchCommand(*commands);
  AddWarmCommand(*commands);
  AddRemoveCommand(*commands);
  AddInfoCommand(*commands);
  AddExplainCommand(*commands);
  AddExportCommand(*commands);
  AddVerifyCommand(*commands);
  AddStatusCommand(*commands);
  return commands;
}

int RunCommandLine(std::vector<std::string> words) {
  return FinishOutput(Execute(std::move(words)));
}

}  // namespace ckptfs
