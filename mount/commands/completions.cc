// SPDX-License-Identifier: Apache-2.0
//
// The `completions` command writes the shells' completions from the table of commands: a word or
// option that is added there is completed without another line.

#include <fmt/format.h>

#include <cctype>
#include <cstdio>
#include <set>
#include <utility>

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

// The shell's offer for the value; for a choice of words, those.
unsigned OffersOf(const CommandOption& option) {
  if (option.offers) return *option.offers;
  if (option.value == "RUN") return kOfferRuns;
  if (option.positional() && option.value.empty()) return kOfferFiles;
  for (const std::string_view files : {"DIR", "PATH", "FILE"}) {
    if (option.value.find(files) != std::string::npos) return kOfferFiles;
  }
  return kOfferNothing;
}

// "steps files": the words that the scripts know offers by.
std::string OfferWords(const CommandOption& option) {
  const unsigned offers = OffersOf(option);
  std::string words;
  for (const auto& [offer, word] : {std::pair(kOfferSteps, "steps"), std::pair(kOfferRuns, "runs"),
                                    std::pair(kOfferIds, "ids"), std::pair(kOfferFiles, "files")}) {
    if ((offers & offer) != 0) words += StrCat(words.empty() ? "" : " ", word);
  }
  return words.empty() ? "nothing" : words;
}

std::string OptionsText(const Command& command) {
  std::string text = "--help";
  for (const CommandOption& option : command.options) {
    if (!option.positional()) text += " " + option.name;
  }
  return text;
}

// Options of any command that take a value: the word behind them has no place of its own.
std::set<std::string> ValuedOptions(const CommandSet& commands) {
  std::set<std::string> names;
  for (const Command& command : commands.commands()) {
    for (const CommandOption& option : command.options) {
      if (!option.positional() && !IsFlag(option)) names.insert(option.name);
    }
  }
  return names;
}

std::string Joined(const std::set<std::string>& words, std::string_view separator) {
  std::string text;
  for (const std::string& word : words) text += StrCat(text.empty() ? "" : separator, word);
  return text;
}

// The place of a word as the scripts count it: 0, 1, ...; `any` stands for all where there may be
// any number.
std::string PlaceOf(const CommandOption& option, size_t place, std::string_view any) {
  return option.many() ? std::string(any) : std::to_string(place);
}

constexpr std::string_view kSteps = "ckptfs list --names 2>/dev/null";

// "words='a b'" or "offer='steps files'".
std::string BashCase(const std::string& pattern, const CommandOption& option) {
  const std::string words = ChoicesOf(option.value);
  return StrCat(
      "    ", pattern, ") ",
      words.empty() ? StrCat("offer='", OfferWords(option), "'") : StrCat("words='", words, "'"),
      " ;;\n");
}

constexpr std::string_view kBashTail = R"sh(  local word one kind run='' found=
  cur=$(_ckptfs_plain "$cur") first=$(_ckptfs_plain "$first")
  case $offer in *steps* | *runs* | *ids*) found=$(%STEPS%) ;; esac
  COMPREPLY=()
  while IFS= read -r word; do  # not compgen -W, which expands what names hold
    for kind in $offer; do
      case $kind in
        steps) one=$word ;;
        runs) one=${word%%/*}; [ "$one" != "$run" ] || continue; run=$one ;;
        ids) [[ $word == "$first/"* ]] || continue; one=${word#*/} ;;
        *) continue ;;
      esac
      if [[ -n $one && $one == "$cur"* ]]; then COMPREPLY+=("$one"); fi
    done
  done <<< "$found"
  if [[ " $offer " == *' files '* ]]; then
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$cur")
  fi
}
complete -o filenames -F _ckptfs ckptfs
)sh";

std::string Replaced(std::string text, std::string_view from, std::string_view to) {
  return text.replace(text.find(from), from.size(), to);
}

std::string BashScript(const CommandSet& commands) {
  std::string names, options, values, places;
  for (const Command& command : commands.commands()) {
    names += StrCat(names.empty() ? "" : " ", command.name);
    options += StrCat("    ", command.name, ") options='", OptionsText(command), "' ;;\n");
    size_t place = 0;
    for (const CommandOption& option : command.options) {
      if (option.positional()) {
        places += BashCase(StrCat(command.name, ":", PlaceOf(option, place++, "*")), option);
      } else if (!IsFlag(option)) {
        values += BashCase(StrCat(command.name, ":", option.name), option);
      }
    }
  }
  const std::string head = StrCat(
      "# ckptfs(1) completions for bash; made by `ckptfs completions bash`\n"
      "_ckptfs_plain() {  # a word as it was meant, without the quotes that were typed\n"
      "  local word=$1\n"
      "  case $word in\n"
      "    \\'*) word=${word:1}; word=${word%\\'} ;;\n"
      "    '\"'*) word=${word:1}; word=${word%'\"'} ;;\n"
      "  esac\n"
      "  printf '%s' \"${word//\\\\/}\"\n"
      "}\n"
      "_ckptfs() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
      "  local command=${COMP_WORDS[1]} options= words= offer= first= place=0 i\n"
      "  if [ \"$COMP_CWORD\" -le 1 ]; then\n"
      "    COMPREPLY=($(compgen -W 'help --help --version ",
      names,
      "' -- \"$cur\"))\n"
      "    return\n"
      "  fi\n"
      "  case $command:$prev in\n",
      values,
      "  esac\n"
      "  case $command in\n"
      "    help) options='",
      names, "' ;;\n", options,
      "  esac\n"
      "  if [ -z \"$words$offer\" ] && [[ $cur == -* || $command == help ]]; then words=$options; "
      "fi\n");
  const std::string count = StrCat(
      "  for ((i = 2; i < COMP_CWORD; i++)); do\n"
      "    case ${COMP_WORDS[i]} in\n"
      "      ",
      Joined(ValuedOptions(commands), "|"),
      ")\n"
      "        [ \"${COMP_WORDS[i+1]}\" = = ] && ((i++))\n"
      "        ((i++)) ;;\n"
      "      -*) ;;\n"
      "      *) [ $place -eq 0 ] && first=${COMP_WORDS[i]}\n"
      "         ((++place)) ;;\n"
      "    esac\n"
      "  done\n"
      "  [ -n \"$words$offer\" ] || case $command:$place in\n",
      places,
      "  esac\n"
      "  if [ -n \"$words\" ]; then\n"
      "    COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
      "    return\n"
      "  fi\n");
  return StrCat(head, count, Replaced(std::string(kBashTail), "%STEPS%", kSteps));
}

// The zsh action for a value.
std::string ZshAction(const CommandOption& option) {
  if (const std::string words = ChoicesOf(option.value); !words.empty())
    return StrCat("(", words, ")");
  const std::string offer = OfferWords(option);
  if (offer == "nothing") return " ";
  return offer == "files" ? "_files" : StrCat("{_ckptfs_offer ", offer, "}");
}

std::string ZshCase(const Command& command) {
  std::string text = StrCat("    ", command.name, ")\n      _arguments '--help[how it is used]'");
  size_t place = 1;
  for (const CommandOption& option : command.options) {
    const std::string action = ZshAction(option);
    std::string spec = StrCat(PlaceOf(option, place, "*"), ":", option.name, ":", action);
    if (option.positional()) {
      ++place;
    } else {
      std::string help = option.help;
      for (char& letter : help) letter = letter == '[' || letter == ']' ? '|' : letter;
      spec = StrCat(option.many() ? "*" : "", option.name, "[", help, "]",
                    IsFlag(option) ? "" : StrCat(":value:", action));
    }
    text += StrCat(" \\\n        ", SingleQuoted(spec));
  }
  return text + "\n      ;;\n";
}

constexpr std::string_view kZshOffer = R"sh(_ckptfs_offer() {
  local -a steps
  steps=(${(f)"$(%STEPS%)"})
  local offer run
  for offer in $@; do
    case $offer in
      steps) compadd -a steps ;;
      runs) compadd -- ${(u)steps%%/*} ;;
      ids)
        for run in ${words[2,CURRENT-1]}; do [[ $run == -* ]] || break; done
        compadd -- ${${(M)steps:#${run}/*}#*/} ;;
      files) _files ;;
    esac
  done
}
)sh";

std::string ZshScript(const CommandSet& commands) {
  std::string names, cases;
  for (const Command& command : commands.commands()) {
    names += StrCat("    ", SingleQuoted(StrCat(command.name, ":", command.description)), "\n");
    cases += ZshCase(command);
  }
  return StrCat(
      "#compdef ckptfs\n"
      "# ckptfs(1) completions for zsh; made by `ckptfs completions zsh`\n",
      Replaced(std::string(kZshOffer), "%STEPS%", kSteps),
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

constexpr std::string_view kFishFunctions =
    R"sh(function __ckptfs_words  # of the line, but options and their values
  set -l value 0
  for token in (commandline -opc)
    if test $value = 1
      set value 0
      continue
    end
    switch $token
      case %VALUED%
        set value 1
      case '-*'
      case '*'
        printf '%s\n' $token
    end
  end
end
function __ckptfs_at  # COMMAND PLACE: where the word that is typed stands; * is any place
  set -l words (__ckptfs_words)
  test "$words[2]" = $argv[1]; and begin; test $argv[2] = '*'; or test (count $words) = (math $argv[2] + 2); end
end
function __ckptfs_steps
  ckptfs list --names 2>/dev/null
end
function __ckptfs_runs
  __ckptfs_steps | cut -d / -f1 | sort -u
end
function __ckptfs_ids
  set -l words (__ckptfs_words)
  for step in (__ckptfs_steps)
    string match -q -- "$words[3]/*" $step; and string split -m 1 / $step | tail -n 1
  end
end
)sh";

// "-f -a '(__ckptfs_steps)'", as much as the value asks for.
std::string FishOffer(const CommandOption& option) {
  if (const std::string words = ChoicesOf(option.value); !words.empty()) {
    return StrCat(" -f -a ", SingleQuoted(words));
  }
  const std::string offers = OfferWords(option);
  std::string text = offers.find("files") == std::string::npos ? " -f" : " -F";
  std::string made;
  for (const char* word : {"steps", "runs", "ids"}) {
    if (offers.find(word) != std::string::npos)
      made += StrCat(made.empty() ? "" : " ", "(__ckptfs_", word, ")");
  }
  return made.empty() ? text : StrCat(text, " -a '", made, "'");
}

std::string FishScript(const CommandSet& commands) {
  std::string text = StrCat(
      "# ckptfs(1) completions for fish; made by `ckptfs completions fish`\n",
      Replaced(std::string(kFishFunctions), "%VALUED%", Joined(ValuedOptions(commands), " ")),
      "complete -c ckptfs -n __fish_use_subcommand -f -a help -d 'How a command is used'\n");
  for (const Command& command : commands.commands()) {
    text += StrCat("complete -c ckptfs -n '__fish_seen_subcommand_from help' -f -a ", command.name,
                   " -d ", SingleQuoted(command.description), "\n");
  }
  for (const Command& command : commands.commands()) {
    const std::string seen = StrCat(" -n '__fish_seen_subcommand_from ", command.name, "'");
    text += StrCat("complete -c ckptfs -n __fish_use_subcommand -f -a ", command.name, " -d ",
                   SingleQuoted(command.description), "\n");
    text += StrCat("complete -c ckptfs", seen, " -f\n");  // files where one asks for them
    size_t place = 0;
    for (const CommandOption& option : command.options) {
      if (option.positional()) {
        text += StrCat("complete -c ckptfs -n \"__ckptfs_at ", command.name, " ",
                       PlaceOf(option, place++, "'*'"), "\"", FishOffer(option), "\n");
        continue;
      }
      text += StrCat("complete -c ckptfs", seen, " -l ", option.name.substr(2), " -d ",
                     SingleQuoted(option.help),
                     IsFlag(option) ? "" : StrCat(" -r", FishOffer(option)), "\n");
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
  Command& command =
      commands.Add("completions", "Print what a shell completes of this command line");
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
