// SPDX-License-Identifier: Apache-2.0
//
// The values that options have once a command line was parsed, and the command line that gives
// them again.

#include <string>
#include <vector>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/fuse/mount_table.h"
#include "mount/options.h"
#include "mount/shell_words.h"

namespace ckptfs {

namespace {

// For options that take no path as it was written.
std::string AbsoluteValue(const CommandOption& option, const std::string& value) {
  if (option.value == "FILE|syslog|stderr") return AbsoluteLog(value);
  const size_t begin = option.value == "FROM=TO" ? value.find('=') + 1 : 0;
  const bool path =
      begin != 0 || option.value == "DIR" || option.value == "PATH" || option.positional();
  // A mount is not looked into: nobody may be serving it yet.
  const auto absolute = option.positional() ? MountpointPath(value)
                        : path              ? AbsolutePath(value.substr(begin))
                                            : Result<std::string>(value);
  return absolute ? value.substr(0, begin) + *absolute : value;
}

// The value that was given to an option, if any; empty for a flag.
std::vector<std::string> GivenValues(const CommandOption& option) {
  const auto number = [](uint64_t given, uint64_t initial) {
    return given == initial ? std::vector<std::string>() : std::vector{std::to_string(given)};
  };
  if (const auto flag = std::get_if<bool*>(&option.target))
    return std::vector<std::string>(**flag ? 1 : 0);
  if (const auto many = std::get_if<std::vector<std::string>*>(&option.target)) return **many;
  if (const auto count = std::get_if<unsigned*>(&option.target))
    return number(**count, option.initial);
  if (const auto count = std::get_if<uint64_t*>(&option.target))
    return number(**count, option.initial);
  const std::string& text = **std::get_if<std::string*>(&option.target);
  return text.empty() ? std::vector<std::string>() : std::vector{text};
}

}  // namespace

std::vector<std::string> WordsAgain(const Command& command, const std::string& store) {
  std::vector<std::string> words = {command.name, "--store", store}, places;
  if (!command.config.empty()) words.insert(words.end(), {"--config", command.config});
  for (const CommandOption& option : command.options) {
    if (option.name == "--store" || option.name == "--foreground" || option.name == "--config")
      continue;
    if (command.from_file.contains(option.name)) continue;  // the file says it, then as well
    for (const std::string& value : GivenValues(option)) {
      if (!option.positional()) words.push_back(option.name);
      if (value.empty()) continue;
      (option.positional() ? places : words).push_back(AbsoluteValue(option, value));
    }
  }
  words.insert(words.end(), places.begin(), places.end());
  return words;
}

std::string CommandAgain(const Command& command, const std::string& store) {
  std::string line = "ckptfs";
  for (const std::string& word : WordsAgain(command, store)) line += StrCat(" ", ShellWord(word));
  return line;
}

ConfigurationRequest ConfigurationOf(const Command& command) {
  ConfigurationRequest request;
  request.file = command.config;
  request.values = ValuesOfOptions(command);
  if (command.config.empty()) return request;
  for (const std::string& name : command.from_file) request.from_file.insert(name.substr(2));
  // The words and the path are all that reading again needs of the command.
  request.read_again = [words = command.words, name = command.name, file = command.config] {
    Command as{name, "", {}, {}};
    as.words = words;
    as.config = file;
    return MakeCommandSet()->ReadAgain(as);
  };
  return request;
}

OptionValues ValuesOfOptions(const Command& command) {
  OptionValues all;
  for (const auto* options : {&command.options, &command.file_options}) {
    for (const CommandOption& option : *options) {
      auto values = GivenValues(option);
      if (values.empty()) continue;
      if (std::holds_alternative<bool*>(option.target)) values = {"true"};
      all[option.positional() ? option.name : option.name.substr(2)] = std::move(values);
    }
  }
  return all;
}

}  // namespace ckptfs
