// SPDX-License-Identifier: Apache-2.0
//
// The `config` command checks configuration files, and has daemons read theirs again.

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/config_file.h"
#include "mount/commands/live.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kReloadAnswer{60};

struct ConfigFlags {
  std::string action;
  std::vector<std::string> files;
  LiveOptions live;
};

Result<std::string> ParseConfigAction(const std::string& text) {
  if (text == "check" || text == "reload") return text;
  return Fail(ErrorCode::kInvalid, StrCat("'", text, "': check or reload"));
}

// Files as they are, and the *.toml of directories.
Result<std::vector<std::string>> FilesToCheck(const std::vector<std::string>& given) {
  std::vector<std::string> files;
  for (const std::string& text :
       given.empty() ? std::vector<std::string>{kConfigDirectory} : given) {
    std::error_code error;
    const bool directory = std::filesystem::is_directory(text, error);
    if (!directory && text != kConfigDirectory) {
      CKPT_ASSIGN_OR_RETURN(std::string path, ConfigPath(text));
      files.push_back(std::move(path));
      continue;
    }
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(text, error)) {
      if (entry.path().extension() == ".toml") found.push_back(entry.path());
    }
    if (found.empty()) return Fail(ErrorCode::kNotFound, StrCat(text, ": no *.toml is there"));
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

// Says the errors of the file, a line each.
std::vector<std::string> ErrorsOf(const std::string& path, std::string& about) {
  const auto text = ReadConfigText(path);
  if (!text) return {text.error().message};
  const auto name = CommandOfConfig(*text, path);
  if (!name) return {name.error().message};
  const auto commands = MakeCommandSet();
  Command& command = *commands->Find(*name);
  auto errors = ApplyConfig(*text, path, {}, command);
  if (!errors.empty()) return errors;
  const OptionValues values = ValuesOfOptions(command);
  about = StrCat("a ", *name, ", ", Counted(values.size(), "option"));
  const std::string mountpoint = ValueOf(values, "mountpoint");
  if (*name == "mount" && mountpoint.empty()) about += "; the command line names its mount point";
  if (!mountpoint.empty()) about += StrCat(" at ", mountpoint);
  return {};
}

Status CheckConfigs(const ConfigFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto files, FilesToCheck(options.files));
  bool sound = true;
  for (const std::string& path : files) {
    std::string about;
    const auto errors = ErrorsOf(path, about);
    for (const std::string& error : errors) fmt::print("{}\n", Printable(error));
    if (errors.empty()) fmt::print("{}: ok: {}\n", Printable(path), Printable(about));
    sound = sound && errors.empty();
  }
  return ExitWith(sound ? 0 : static_cast<int>(ExitCode::kRefused));
}

void PrintNames(const char* what, const nlohmann::json& names) {
  std::string list;
  for (const auto& name : names) {
    if (name.is_string()) list += StrCat(list.empty() ? "" : ", ", name.get<std::string>());
  }
  if (!list.empty()) fmt::print("  {}: {}\n", what, Printable(list));
}

// False if an option that changed could not be put in force.
Result<bool> ReloadOne(const LiveMount& mount) {
  CKPT_ASSIGN_OR_RETURN(const std::string text, AskDaemon(mount, "reload", {}, kReloadAnswer));
  const auto report = nlohmann::json::parse(text, nullptr, false);
  fmt::print("{}: {} was read again\n",
             Printable(mount.mountpoint.empty() ? mount.store : mount.mountpoint),
             Printable(report.value("file", "")));
  PrintNames("in force now", report.value("applied", nlohmann::json::array()));
  PrintNames("waits for the next start", report.value("needs_restart", nlohmann::json::array()));
  for (const auto& one : report.value("failed", nlohmann::json::array())) {
    fmt::print("  failed: {}: {}\n", Printable(one.value("option", "")),
               Printable(one.value("why", "")));
  }
  return report.value("failed", nlohmann::json::array()).empty();
}

// Each that has a file; an error where none has.
Status ReloadConfigs(const ConfigFlags& options) {
  if (!options.files.empty()) {
    return RefuseUsage("`config reload` takes no FILE: each daemon reads its own again");
  }
  CKPT_ASSIGN_OR_RETURN(const auto mounts, ChooseMounts(options.live, true));
  bool all = true;
  for (const LiveMount& mount : mounts) {
    const auto done = ReloadOne(mount);
    if (done) {
      all = all && *done;
      continue;
    }
    const std::string where = mount.mountpoint.empty() ? mount.store : mount.mountpoint;
    if (mounts.size() == 1) return Fail(Error(done.error()).WithContext(where));
    fmt::print("{}: {}\n", Printable(where), Printable(done.error().message));
    all = false;
  }
  return ExitWith(all ? 0 : static_cast<int>(ExitCode::kFailed));
}

}  // namespace

void AddConfigCommand(CommandSet& commands) {
  auto options = std::make_shared<ConfigFlags>();
  Command& command = commands.Add(
      "config", "Check configuration files, or have daemons read theirs again (check, reload)");
  command.Add("ACTION", options->action, "check or reload")
      .Value("check|reload")
      .Check(Checked(ParseConfigAction))
      .Required();
  command.Add("FILE", options->files, "For check: files or directories (default: /etc/ckptfs)");
  AddLiveOptions(command, options->live);
  command.body = [options] {
    return options->action == "check" ? CheckConfigs(*options) : ReloadConfigs(*options);
  };
}

}  // namespace ckptfs
