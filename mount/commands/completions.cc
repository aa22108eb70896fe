// SPDX-License-Identifier: Apache-2.0
//
// What shells complete, made from the table of commands: a word or option that is added there is
// completed without another line.

#include <fmt/format.h>

#include <cctype>
#include <cstdio>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/options.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

struct CompletionsFlags {
  std::string shell;
};

// "stream|materialise|direct" -> stream materialise direct; "" if it is not a choice of words.
std::string ChoicesOf(const std::string& value) {
  if (value.find('|') == std::string::npos) return "";
  std::string words = value;
  for (char& letter : words) {
    if (std::isupper(static_cast<unsigned char>(letter)) != 0) return "";
    if (letter == '|') letter = ' ';
  }
  return words;
}

bool IsFlag(const CommandOption& option) { return std::holds_alternative<bool*>(option.target); }

// Of what stands without an option.
std::string WordsOf(const Command& command) {
  for (const CommandOption& option : command.options) {
    if (option.positional()) return ChoicesOf(option.value);
  }
  return "";
}

bool TakesStep(const Command& command) {
  for (const CommandOption& option : command.options) {
    if (!option.positional()) continue;
    return option.name == "STEP" || option.name == "SUBJECT" || option.name == "RUN";
  }
  return false;
}

std::string OptionsText(const Command& command) {
  std::string text = "--help";
  for (const CommandOption& option : command.options) {
    if (!option.positional()) text += " " + option.name;
  }
  return text;
}

constexpr std::string_view kSteps = "ckptfs list 2>/dev/null | sed 1d | cut -d' ' -f1";

std::string BashScript(const CommandSet& commands) {
  std::string names, options, choices, steps, fixed;
  for (const Command& command : commands.commands()) {
    const std::string own = WordsOf(command);
    if (!own.empty()) fixed += StrCat("    ", command.name, ") words='", own, "' ;;\n");
    names += StrCat(names.empty() ? "" : " ", command.name);
    options += StrCat("    ", command.name, ") options='", OptionsText(command), "' ;;\n");
    if (TakesStep(command)) steps += StrCat(steps.empty() ? "" : "|", command.name);
    for (const CommandOption& option : command.options) {
      const std::string words = ChoicesOf(option.value);
      if (words.empty() || option.positional()) continue;
      choices += StrCat("    ", command.name, ":", option.name, ") words='", words, "' ;;\n");
    }
  }
  return StrCat(
      "# ckptfs(1) completions for bash; made by `ckptfs completions bash`\n"
      "_ckptfs() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
      "  local command=${COMP_WORDS[1]} options= words= steps=\n"
      "  if [ \"$COMP_CWORD\" -le 1 ]; then\n"
      "    COMPREPLY=($(compgen -W 'help --help --version ",
      names,
      "' -- \"$cur\"))\n"
      "    return\n"
      "  fi\n"
      "  case $command:$prev in\n",
      choices,
      "  esac\n"
      "  if [ -n \"$words\" ]; then\n"
      "    COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
      "    return\n"
      "  fi\n"
      "  case $command in\n"
      "    help) options='",
      names, "' ;;\n", options,
      "  esac\n"
      "  if [[ $cur == -* || $command == help ]]; then\n"
      "    COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
      "    return\n"
      "  fi\n"
      "  case $command in\n",
      fixed, "    ", steps, ") steps=$(", kSteps,
      ") ;;\n"
      "  esac\n"
      "  local word\n"
      "  COMPREPLY=()\n"
      "  while IFS= read -r word; do\n"  // not compgen -W, which expands what names hold
      "    if [[ $word == \"$cur\"* && -n $word ]]; then COMPREPLY+=(\"$word\"); fi\n"
      "  done <<< \"$steps\"\n"
      "  while IFS= read -r word; do COMPREPLY+=(\"$word\"); done < <(compgen -W \"$words\" -- \"$cur\"; compgen -f -- \"$cur\")\n"
      "}\n"
      "complete -o filenames -F _ckptfs ckptfs\n");
}

std::string ZshScript(const CommandSet& commands) {
  std::string names, cases;
  for (const Command& command : commands.commands()) {
    std::string described = command.description;
    names += StrCat("    ", SingleQuoted(StrCat(command.name, ":", described)), "\n");
    cases += StrCat("    ", command.name, ")\n      _arguments '--help[how it is used]'");
    for (const CommandOption& option : command.options) {
      if (option.positional()) continue;
      std::string help = option.help;
      for (char& letter : help) letter = letter == '[' || letter == ']' ? '|' : letter;
      const std::string words = ChoicesOf(option.value);
      const std::string value = IsFlag(option)  ? ""
                                : words.empty() ? ":value:_files"
                                                : StrCat(":value:(", words, ")");
      cases += StrCat(" \\\n        ", SingleQuoted(StrCat(option.many() ? "*" : "", option.name, "[", help,
                                                  "]", value)));
    }
    const std::string own = WordsOf(command);
    const std::string rest = TakesStep(command) ? "_ckptfs_steps" : own.empty() ? "_files" : StrCat("(", own, ")");
    cases += StrCat(" \\\n        '*:argument:", rest, "'\n      ;;\n");
  }
  return StrCat(
      "#compdef ckptfs\n"
      "# ckptfs(1) completions for zsh; made by `ckptfs completions zsh`\n"
      "_ckptfs_steps() {\n"
      "  local -a steps\n"
      "  steps=(${(f)\"$(",
      kSteps,
      ")\"})\n"
      "  compadd -a steps\n"
      "  _files\n"
      "}\n"
      "_ckptfs() {\n"
      "  local -a commands\n"
      "  commands=(\n",
      names,
      "  )\n"
      "  if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then\n"
      "    _describe command commands\n"
      "    return\n"
      "  fi\n"
      "  local command=$words[2]\n"
      "  shift words\n"
      "  (( CURRENT-- ))\n"
      "  case $command in\n",
      cases,
      "  esac\n"
      "}\n"
      "_ckptfs \"$@\"\n");
}

std::string FishScript(const CommandSet& commands) {
  std::string text =
      "# ckptfs(1) completions for fish; made by `ckptfs completions fish`\n"
      "complete -c ckptfs -n __fish_use_subcommand -f -a help -d 'How a command is used'\n";
  for (const Command& command : commands.commands()) {
    text += StrCat("complete -c ckptfs -n '__fish_seen_subcommand_from help' -f -a ", command.name, " -d ",
                   SingleQuoted(command.description), "\n");
  }
  for (const Command& command : commands.commands()) {
    const std::string seen = StrCat(" -n '__fish_seen_subcommand_from ", command.name, "'");
    text += StrCat("complete -c ckptfs -n __fish_use_subcommand -f -a ", command.name, " -d ",
                   SingleQuoted(command.description), "\n");
    const std::string own = WordsOf(command);
    if (!own.empty()) text += StrCat("complete -c ckptfs", seen, " -f -a '", own, "'\n");
    if (TakesStep(command)) text += StrCat("complete -c ckptfs", seen, " -a '(", "ckptfs list 2>/dev/null | sed 1d | cut -d \" \" -f1", ")'\n");
    for (const CommandOption& option : command.options) {
      if (option.positional()) continue;
      const std::string words = ChoicesOf(option.value);
      text += StrCat("complete -c ckptfs", seen, " -l ", option.name.substr(2), " -d ",
                     SingleQuoted(option.help), IsFlag(option) ? "" : " -r",
                     words.empty() ? "" : StrCat(" -f -a ", SingleQuoted(words)), "\n");
    }
  }
  return text;
}

Result<bool> CheckShell(const std::string& shell) {
  if (shell == "bash" || shell == "zsh" || shell == "fish") return true;
  return Fail(ErrorCode::kInvalid, StrCat("'", shell, "': bash, zsh or fish"));
}

}  // namespace

std::string CompletionScript(const CommandSet& commands, const std::string& shell) {
  if (shell == "bash") return BashScript(commands);
  return shell == "zsh" ? ZshScript(commands) : FishScript(commands);
}

void AddCompletionsCommand(CommandSet& commands) {
  auto options = std::make_shared<CompletionsFlags>();
  Command& command = commands.Add("completions", "Print what a shell completes of this command line");
  command.Add("SHELL", options->shell, "bash, zsh or fish")
      .Value("bash|zsh|fish")
      .Required()
      .Check(Checked(CheckShell));
  command.body = [options, &commands]() -> Status {
    fmt::print("{}", CompletionScript(commands, options->shell));
    return {};
  };
}

}  // namespace ckptfs
