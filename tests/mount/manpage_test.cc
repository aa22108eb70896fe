// SPDX-License-Identifier: Apache-2.0

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>

#include "mount/commands/command_set.h"
#include "mount/manual.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

std::string ManPage() {
  std::ifstream file(std::string(CKPTFS_TEST_DATA) + "/../docs/reference/ckptfs.1.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The options each "### command" section lists: lines that begin with - `--
std::map<std::string, std::set<std::string>> OptionsOfManPage() {
  std::map<std::string, std::set<std::string>> commands;
  std::istringstream lines(ManPage());
  std::string command;
  const std::regex heading("### ([a-z]+).*");
  const std::regex option("- `(--[a-z-]+).*");
  for (std::string line; std::getline(lines, line);) {
    std::smatch match;
    if (line.starts_with("## ")) command.clear();
    if (std::regex_match(line, match, heading)) commands[command = match[1]];
    if (!command.empty() && std::regex_match(line, match, option))
      commands[command].insert(match[1]);
  }
  return commands;
}

std::map<std::string, std::set<std::string>> OptionsOfProgram() {
  std::map<std::string, std::set<std::string>> commands;
  const auto set = MakeCommandSet();
  for (const Command& command : set->commands()) {
    auto& options = commands[command.name];
    for (const CommandOption& option : command.options) {
      if (!option.positional()) options.insert(option.name);
    }
  }
  return commands;
}

TEST(ManPage, ListsExactlyTheProgramsCommands) {
  std::set<std::string> page, program;
  for (const auto& [name, options] : OptionsOfManPage()) page.insert(name);
  for (const auto& [name, options] : OptionsOfProgram()) program.insert(name);
  EXPECT_FALSE(program.empty());
  EXPECT_EQ(page, program);
}

TEST(ManPage, ListsExactlyEveryCommandsOptions) {
  const auto page = OptionsOfManPage();
  for (const auto& [name, options] : OptionsOfProgram()) {
    const auto found = page.find(name);
    if (found == page.end()) continue;  // the test above says so
    EXPECT_EQ(found->second, options) << name;
  }
}

TEST(ManPage, HeadingsNameThePositionals) {
  const std::string page = ManPage();
  const auto set = MakeCommandSet();
  for (const Command& command : set->commands()) {
    std::string heading = "### " + command.name;
    for (const CommandOption& option : command.options) {
      if (!option.positional()) continue;
      const std::string many = option.many() ? "..." : "";
      heading += option.required ? " " + option.name + many : " [" + option.name + "]" + many;
    }
    EXPECT_NE(page.find(heading + "\n"), std::string::npos) << heading;
  }
}

TEST(ManPage, IsRoff) {
  const std::string page = ManPageOf(ManPage(), "what it is");
  EXPECT_TRUE(page.starts_with(".TH CKPTFS 1\n.SH NAME\nckptfs \\- what it is\n"));
  for (const char* line : {"\n.SH COMMANDS\n", "\n.SS mount [PATH]...\n", "\n.TP\n0\nsuccess\n",
                           "\\fB\\-\\-store DIR\\fR the store"}) {
    EXPECT_NE(page.find(line), std::string::npos) << line;
  }
  std::istringstream lines(page);
  const std::regex macro("\\.(TH|SH|SS|PP|IP|TP|RS|RE|nf|fi)( .*)?");
  for (std::string line; std::getline(lines, line);) {
    EXPECT_TRUE(!line.starts_with('.') || std::regex_match(line, macro)) << line;
    EXPECT_FALSE(line.starts_with('\'')) << line;
    EXPECT_EQ(line.find('`'), std::string::npos) << line;
  }
}

TEST(Completions, NameEveryCommandAndOption) {
  const auto set = MakeCommandSet();
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = CompletionScript(*set, shell);
    for (const Command& command : set->commands()) {
      EXPECT_NE(script.find(command.name), std::string::npos) << shell << " " << command.name;
      for (const CommandOption& option : command.options) {
        if (option.positional()) continue;
        const std::string written =
            std::string(shell) == "fish" ? option.name.substr(2) : option.name;
        EXPECT_NE(script.find(written), std::string::npos) << shell << " " << option.name;
      }
    }
  }
}

TEST(ManPage, ExitCodesAreTheTable) {
  std::set<int> table;
  std::istringstream lines(ManPage());
  const std::regex row("\\| (\\d+) \\| .*");
  std::smatch match;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, match, row)) table.insert(std::stoi(match[1]));
  }
  std::set<int> codes = {static_cast<int>(ExitCode::kOk), static_cast<int>(ExitCode::kUsage)};
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    codes.insert(static_cast<int>(ExitCodeOf(static_cast<ErrorCode>(code))));
  }
  EXPECT_EQ(table, codes);
}

}  // namespace
}  // namespace ckptfs
