// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/usage_errors.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <variant>

#include "core/base/edit_distance.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kTypingErrors = 2;  // between a word and the one that was meant

// Converters of others have these names.
constexpr std::string_view kConverters[] = {"convert",       "consolidate",      "merge",
                                            "merge-weights", "zero_to_fp32",     "ds_to_universal",
                                            "dcp_to_torch",  "dcp_to_torch_save"};

// "do you mean a, b?", or what there is.
std::string Suggestion(std::string_view word, const std::vector<std::string>& known) {
  const std::vector<std::string> near = NearestWords(word, known, kTypingErrors);
  std::string list;
  for (const std::string& one : near.empty() ? known : near) {
    list += StrCat(list.empty() ? "" : ", ", one);
  }
  return near.empty() ? StrCat("there are ", list) : StrCat("do you mean ", list, "?");
}

// "--step" of "--step=a/1".
std::string WrittenName(const std::string& word) { return word.substr(0, word.find('=')); }

}  // namespace

std::string WhyNoCommand(const std::deque<Command>& commands, const std::string& word) {
  if (std::ranges::find(kConverters, word) != std::end(kConverters)) {
    return StrCat("no command '", word,
                  "': a mount shows views without converting, and `ckptfs export` writes one as "
                  "files: docs/use/instead-of.md");
  }
  std::vector<std::string> names;
  for (const Command& command : commands) names.push_back(command.name);
  return StrCat("no command '", word, "'; ", Suggestion(word, names));
}

std::string WhyNotInFront(const std::deque<Command>& commands,
                          const std::vector<std::string>& words) {
  std::vector<std::string> known = {"--help", "--version"};
  for (const Command& command : commands) {
    if (std::ranges::find(words, command.name) == words.end()) continue;
    for (const CommandOption& option : command.options) known.push_back(option.name);
    break;
  }
  const std::string name = WrittenName(words[0]);
  return StrCat("'", name, "': options follow the command, as in `ckptfs COMMAND --help`",
                std::ranges::find(known, name) == known.end() ? MeantText(name, known) : "");
}

std::string WhyExtra(const Command& command, const std::string& extra) {
  if (!extra.starts_with('-')) {
    return StrCat("'", extra, "' is one argument more than `", command.name, "` takes");
  }
  std::vector<std::string> options = {"--help"};
  for (const CommandOption& option : command.options) {
    if (!option.positional()) options.push_back(option.name);
  }
  const std::string written = WrittenName(extra);
  return StrCat("`", command.name, "` has no option '", written, "'; ",
                Suggestion(written, options));
}

std::string WhyMissing(const Command& command, const std::set<std::string>& given) {
  std::string line = StrCat("`ckptfs ", command.name), missing;
  for (const CommandOption& option : command.options) {
    if (!option.required) continue;
    line += StrCat(" ", option.name, option.positional() ? "" : StrCat(" ", option.value));
    if (missing.empty() && !given.contains(option.name)) missing = option.name;
  }
  return missing.empty() ? "" : StrCat(missing, " is required: ", line, "`");
}

std::string UnknownOption(const Command& command, const std::vector<std::string>& words) {
  for (size_t i = 1; i < words.size() && words[i] != "--"; ++i) {
    if (!words[i].starts_with("--") || words[i] == "--help") continue;
    const std::string name = WrittenName(words[i]);
    const auto option = std::ranges::find(command.options, name, &CommandOption::name);
    if (option == command.options.end()) return words[i];
    const bool flag = std::holds_alternative<bool*>(option->target);
    if (!flag && name == words[i]) ++i;  // its value
  }
  return "";
}

}  // namespace ckptfs
