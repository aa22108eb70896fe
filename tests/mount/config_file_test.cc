// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/config_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/daemon/configuration.h"

namespace ckptfs {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Errors = std::vector<std::string>;

// A mount's options after a file was applied.
struct Applied {
  std::unique_ptr<CommandSet> commands = MakeCommandSet();
  Command& command = *commands->Find("mount");
  Errors errors;
  OptionValues values;
};

Applied Apply(std::string_view text, const std::set<std::string>& given = {}) {
  Applied applied;
  applied.errors = ApplyConfig(text, "/c.toml", given, applied.command);
  applied.values = ValuesOfOptions(applied.command);
  return applied;
}

TEST(ConfigFile, SaysWhatALineSays) {
  const Applied applied = Apply(R"([mount]
mountpoint = "/mnt/run7"
checkpoint = ["/data/run7", "/data/run8"]
follow = true
link = false
budget = "8G"
keep-last = 5
layout = "tp2_dp4"
metrics-listen = 9464
)");
  EXPECT_THAT(applied.errors, IsEmpty());
  const OptionValues expected = {
      {"mountpoint", {"/mnt/run7"}}, {"checkpoint", {"/data/run7", "/data/run8"}},
      {"follow", {"true"}},          {"budget", {"8G"}},
      {"keep-last", {"5"}},          {"layout", {"tp2_dp4"}},
      {"metrics-listen", {"9464"}}};
  EXPECT_EQ(applied.values, expected);
}

TEST(ConfigFile, EveryOptionButThoseOfTheLineAloneCanBeSaid) {
  for (const char* name : {"mount", "daemon"}) {
    const auto commands = MakeCommandSet();
    for (const CommandOption& option : commands->Find(name)->options) {
      if (option.positional()) continue;
      // A value that no option takes: it is known, or it is not.
      const std::string text = StrCat("[", name, "]\n", option.name.substr(2), " = 1979-05-27\n");
      const auto errors = ApplyConfig(text, "/c.toml", {}, *commands->Find(name));
      ASSERT_EQ(errors.size(), 1u);
      EXPECT_EQ(errors[0].find("is not an option") != std::string::npos, option.name == "--config")
          << errors[0];
    }
  }
}

TEST(ConfigFile, ErrorsNameTheLineAndTheRule) {
  EXPECT_THAT(Apply("[mount]\nfollow = true\nbugdet = \"8G\"\n").errors,
              ElementsAre("/c.toml:3: 'bugdet' is not an option of [mount]; do you mean budget?"));
  EXPECT_THAT(
      Apply("[mount]\nbudget = \"8Q\"\nkeep-last = 0\nfollow = \"yes\"\nstore = \"rel\"\n"
            "step = [\"a\", \"b\"]\nhot-steps = -1\nlayout = [1.5]\n")
          .errors,
      ElementsAre(HasSubstr("/c.toml:2: budget: '8Q' is not a size"),
                  "/c.toml:3: keep-last: at least 1", "/c.toml:4: follow: it is true or false",
                  "/c.toml:5: store: 'rel' is not an absolute path",
                  "/c.toml:6: step: it has one value",
                  "/c.toml:7: hot-steps: a number is at least 0",
                  "/c.toml:8: layout: a value is a text or a whole number"));
  EXPECT_THAT(Apply("[mount]\nlink = true\ncopy = true\n").errors,
              ElementsAre("/c.toml:3: copy and link exclude each other"));
  EXPECT_THAT(Apply("[mount]\nfollow = tru\n").errors, ElementsAre(HasSubstr("/c.toml:2: ")));
  EXPECT_THAT(Apply("follow = true\n[mount]\n").errors,
              ElementsAre("/c.toml:1: 'follow' does not stand below [mount]"));
  EXPECT_THAT(Apply("[mount]\nconfig = \"/other.toml\"\n").errors,
              ElementsAre(HasSubstr("'config' is not an option")));
}

TEST(ConfigFile, AFileIsForOneCommand) {
  EXPECT_THAT(Apply("[daemon]\n").errors,
              ElementsAre("/c.toml:1: it is for `ckptfs daemon`, not for `mount`"));
  EXPECT_THAT(Apply("").errors, ElementsAre("/c.toml:1: it has no table [mount] or [daemon]"));
  EXPECT_THAT(Apply("mount = 1\n").errors, ElementsAre("/c.toml:1: [mount] is a table"));
  EXPECT_THAT(Apply("[mount]\n[daemon]\n").errors,
              ElementsAre(HasSubstr("a file is for one mount or one daemon")));
}

TEST(ConfigFile, NothingIsSetIfSomethingIsWrong) {
  EXPECT_EQ(Apply("[mount]\nbudget = \"8G\"\nlnik = true\n").values, OptionValues());
}

TEST(ConfigFile, TheLineGoesFirst) {
  EXPECT_EQ(Apply("[mount]\nbudget = \"8G\"\nrun = \"a\"\n", {"--budget"}).values,
            (OptionValues{{"run", {"a"}}}));
  // The line excludes it, too.
  EXPECT_EQ(Apply("[mount]\ncopy = true\n", {"--link"}).values, OptionValues());
  EXPECT_EQ(Apply("[mount]\nlink = true\n", {"--copy"}).values, OptionValues());
}

TEST(ConfigFile, AFileThatOthersMayWriteIsNotBelieved) {
  const std::string path = std::filesystem::path(::testing::TempDir()) / "ops_config.toml";
  std::ofstream(path) << "[mount]\n";
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  EXPECT_EQ(ReadConfigText(path).value(), "[mount]\n");
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_EQ(ReadConfigText(path).error().code, ErrorCode::kPermission);
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  std::filesystem::resize_file(path, kConfigBytes + 1);
  EXPECT_THAT(ReadConfigText(path).error().message, HasSubstr("longer than 1 MiB"));
  std::filesystem::remove(path);
  EXPECT_EQ(ReadConfigText(path).error().code, ErrorCode::kNotFound);
}

TEST(ConfigFile, NamesAreFilesOfTheDirectory) {
  EXPECT_EQ(ConfigPath("run7").value(), "/etc/ckptfs/run7.toml");
  EXPECT_EQ(ConfigPath("run7.toml").value(), "/etc/ckptfs/run7.toml");
  EXPECT_EQ(ConfigPath("/a/b").value(), "/a/b");
}

// ---- a daemon that reads it again ----------------------------------------------

TEST(Configuration, SaysWhatIsInForceAndWhatWaits) {
  OptionValues file = {{"a", {"1"}}, {"b", {"1"}}, {"c", {"1"}}};
  ConfigurationRequest request{"/c.toml", file, {"a"}, [&] { return Result<OptionValues>(file); }};
  Configuration configuration(std::move(request));
  std::vector<std::string> heard;
  configuration.May({"a"}, [&](const OptionValues& now) -> Status {
    heard.push_back(ValueOf(now, "a", "none"));
    return {};
  });
  configuration.May(
      {"c"}, [](const OptionValues&) -> Status { return Fail(ErrorCode::kIo, "it is taken"); });
  EXPECT_EQ(configuration.Reload().value()["applied"].size(), 0u);
  file = {{"b", {"2"}}, {"c", {"2"}}, {"d", {"1"}}};
  const auto report = configuration.Reload().value();
  EXPECT_THAT(heard, ElementsAre("none"));
  EXPECT_EQ(report["applied"], nlohmann::json({"a"}));
  EXPECT_EQ(report["needs_restart"], nlohmann::json({"b", "d"}));
  EXPECT_EQ(report["failed"][0]["why"], "it is taken");
  EXPECT_EQ(configuration.Describe()["needs_restart"], nlohmann::json({"b", "d"}));
  file = {{"b", {"1"}}, {"c", {"1"}}};  // back again: nothing waits
  EXPECT_EQ(configuration.Reload().value()["needs_restart"], nlohmann::json::array());
}

TEST(Configuration, WithoutAFileThereIsNothingToReadAgain) {
  Configuration configuration({});
  EXPECT_FALSE(configuration.has_file());
  EXPECT_FALSE(configuration.Reload());
  EXPECT_TRUE(configuration.Describe()["file"].is_null());
}

}  // namespace
}  // namespace ckptfs
