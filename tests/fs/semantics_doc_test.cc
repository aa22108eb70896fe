// SPDX-License-Identifier: Apache-2.0
//
// Runs the console examples of docs/reference/semantics.md and compares its table of
// errors with the code.  An example is a command after "$ " or "bob$ " and its
// output up to the next command.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "core/base/strings.h"
#include "formats/registry.h"
#include "fs/errno_map.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

using testing::TreeFixture;

struct Example {
  Caller caller;
  std::string command;
  std::string output;
};

std::string ReadDocument() {
  std::ifstream file(CKPTFS_TEST_DATA "/../docs/reference/semantics.md");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<Example> Examples(const std::string& document) {
  std::vector<Example> examples;
  std::istringstream lines(document);
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("```")) {
      inside = line == "```console";
    } else if (inside && line.starts_with("$ ")) {
      examples.push_back({{}, line.substr(2), ""});
    } else if (inside && line.starts_with("bob$ ")) {
      examples.push_back({{12345, 12345, 0}, line.substr(5), ""});
    } else if (inside && !examples.empty()) {
      examples.back().output += line + "\n";
    }
  }
  return examples;
}

std::string ModeText(uint32_t mode) {
  std::string text = S_ISDIR(mode) ? "d" : S_ISLNK(mode) ? "l" : "-";
  for (int bit = 8; bit >= 0; --bit) text += (mode >> bit & 1) != 0 ? "xwr"[bit % 3] : '-';
  return text;
}

// The few programs the examples use, as the kernel would let them.
class Shell {
 public:
  explicit Shell(TreeFixture& tree) : tree_(tree) {}

  std::string Run(const Example& example) {
    std::istringstream words(example.command);
    std::string program, path;
    words >> program;
    std::string format;
    if (program == "stat") words >> path >> format;
    words >> path;
    if (program == "ls") return List(path, example.caller);
    if (program == "readlink") return ReadLink(path, example.caller);
    if (program == "stat") return Stat(path, format, example.caller);
    if (program == "touch") return Touch(path, example.caller);
    if (program == "cat") return Cat(path, example.caller);
    return "no such program: " + program;
  }

 private:
  static std::string Reason(const Error& error) { return std::strerror(ErrnoOf(error)); }

  std::string List(const std::string& path, const Caller& caller) {
    const auto names = tree_.List(path, caller);
    if (!names) return StrCat("ls: cannot access '", path, "': ", Reason(names.error()), "\n");
    std::string output;
    for (const std::string& name : *names) output += name + "\n";
    return output;
  }

  std::string ReadLink(const std::string& path, const Caller& caller) {
    const size_t slash = path.rfind('/');
    const auto directory = tree_.Walk(path.substr(0, slash), caller);
    const auto link = tree_.fs().Lookup(directory.value().inode, path.substr(slash + 1), caller);
    return tree_.fs().ReadLink(link.value().inode, caller).value() + "\n";
  }

  std::string Stat(const std::string& path, const std::string& format, const Caller& caller) {
    const Attributes found = tree_.Walk(path, caller).value();
    std::string output = std::regex_replace(format, std::regex("%A"), ModeText(found.mode));
    return std::regex_replace(output, std::regex("%s"), std::to_string(found.size)) + "\n";
  }

  std::string Touch(const std::string& path, const Caller& caller) {
    const auto file = tree_.Walk(path, caller).value();
    EXPECT_FALSE(tree_.fs().Open(file.inode, O_WRONLY, caller));
    return StrCat("touch: cannot touch '", path, "': ", std::string(std::strerror(kReadOnlyErrno)),
                  "\n");
  }

  std::string Cat(const std::string& path, const Caller& caller) {
    const auto bytes = tree_.ReadAll(path, caller);
    return bytes ? *bytes : StrCat("cat: ", path, ": ", Reason(bytes.error()), "\n");
  }

  TreeFixture& tree_;
};

TEST(SemanticsDocTest, EveryExampleIsTrue) {
  TreeFixture tree(MakeViewFormats());
  tree.AddStep("llama", "global_step5", 5, 1);
  tree.AddStep("llama", "global_step10", 10, 2);
  tree.AddStep("private", "s", 1, 3, 0600);
  FilesystemOptions options;
  options.run = "llama";
  tree.Mount(options);
  Shell shell(tree);
  const std::vector<Example> examples = Examples(ReadDocument());
  EXPECT_GE(examples.size(), 19u);
  for (const Example& example : examples) {
    EXPECT_EQ(shell.Run(example), example.output) << example.command;
  }
}

TEST(SemanticsDocTest, TheTableOfErrorsIsTheCodes) {
  const std::map<std::string, int> numbers{
      {"ENOENT", ENOENT}, {"EACCES", EACCES},         {"ESTALE", ESTALE}, {"EIO", EIO},
      {"EINVAL", EINVAL}, {"EOPNOTSUPP", EOPNOTSUPP}, {"ENOMEM", ENOMEM}, {"EEXIST", EEXIST}};
  const std::string document = ReadDocument();
  for (int code = 0; code <= static_cast<int>(ErrorCode::kInternal); ++code) {
    const std::string name(ErrorCodeName(static_cast<ErrorCode>(code)));
    std::smatch row;
    ASSERT_TRUE(
        std::regex_search(document, row, std::regex("\\| " + name + " \\| `(E[A-Z]+)` \\|")))
        << name;
    EXPECT_EQ(numbers.at(row[1]), ErrnoOf(static_cast<ErrorCode>(code))) << name;
  }
}

}  // namespace
}  // namespace ckptfs
