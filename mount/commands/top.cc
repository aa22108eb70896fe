// SPDX-License-Identifier: Apache-2.0
//
// The `top` command shows what mounts and daemons do now, again and again.

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/commands/top_view.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using TopClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kTopAnswer{10};
constexpr double kLeastInterval = 0.1;
constexpr double kMostInterval = 3600;

struct TopFlags {
  LiveOptions live;
  std::string interval = "2";
  bool once = false;
  bool json = false;
};

Result<std::chrono::milliseconds> ParseInterval(const std::string& text) {
  char* end = nullptr;
  const double seconds = std::strtod(text.c_str(), &end);
  if (end != text.c_str() && *end == '\0' && seconds >= kLeastInterval &&
      seconds <= kMostInterval) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  }
  return Fail(ErrorCode::kInvalid,
              StrCat("'", text, "' is not a number of seconds from 0.1 to 3600"));
}

// Asks each daemon; those that do not answer are left out, and told.
std::vector<TopSample> AskAll(const std::vector<LiveMount>& mounts,
                              std::vector<std::string>& silent) {
  std::vector<TopSample> samples;
  for (const LiveMount& mount : mounts) {
    const auto text = AskDaemon(mount, "status", {{"depth", "counters"}}, kTopAnswer);
    if (!text) {
      silent.push_back(StrCat(mount.mountpoint.empty() ? mount.store : mount.mountpoint, ": ",
                              text.error().message));
      continue;
    }
    samples.push_back({mount.store, mount.mountpoint, mount.pid, TopClock::now(),
                       nlohmann::json::parse(*text, nullptr, false)});
  }
  return samples;
}

// The answers of one look, beside those of the one before.
struct TopLook {
  std::vector<TopSample> samples;
  std::vector<std::string> silent;
  std::string none;  // why there are none
};

TopLook LookAtAll(const TopFlags& options) {
  TopLook look;
  const auto mounts = ChooseMounts(options.live, true);
  if (!mounts) {
    look.none = mounts.error().message;
    return look;
  }
  look.samples = AskAll(*mounts, look.silent);
  return look;
}

nlohmann::json JsonOf(const TopLook& before, const TopLook& now) {
  nlohmann::json all = nlohmann::json::array();
  for (const TopSample& sample : now.samples) {
    const auto found = std::ranges::find(before.samples, sample.mountpoint, &TopSample::mountpoint);
    const bool there = found != before.samples.end() && found->store == sample.store;
    all.push_back(TopJson(there ? &*found : nullptr, sample));
  }
  return all;
}

// Lines that are longer than the terminal is wide would move the others.
void PrintCut(const std::string& text, size_t width) {
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    fmt::print("{}\n", width == 0 ? line : CutUtf8(line, width));
    begin = end + 1;
  }
}

// 0: it is not a terminal.
size_t TerminalWidth() {
  winsize size{};
  if (::isatty(STDOUT_FILENO) == 0) return 0;
  return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col != 0 ? size.ws_col : 80;
}

void Show(const TopFlags& options, const TopLook& before, const TopLook& now) {
  const nlohmann::json all = JsonOf(before, now);
  if (options.json) {
    fmt::print("{}\n", all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    return;
  }
  const size_t width = TerminalWidth();
  if (width != 0 && !options.once) fmt::print("\x1b[H\x1b[2J");
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  std::string text;
  if (!options.once) {
    text = StrCat("ckptfs top, ", LocalTime(std::chrono::nanoseconds(since_1970).count()),
                  ", every ", options.interval, " s; Ctrl-C ends it\n\n");
  }
  for (const nlohmann::json& one : all) text += TopText(one) + "\n";
  for (const std::string& line : now.silent) text += StrCat(Printable(line), "\n");
  if (!now.none.empty()) text += StrCat(Printable(now.none), "\n");
  PrintCut(text, width);
}

Status RunTop(const TopFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto interval, ParseInterval(options.interval));
  TopLook before = LookAtAll(options);
  if (options.once && !before.none.empty()) return Fail(ErrorCode::kNotFound, before.none);
  auto pause = options.once ? interval : std::min(interval, std::chrono::milliseconds(500));
  while (true) {
    std::this_thread::sleep_for(pause);
    TopLook now = LookAtAll(options);
    Show(options, before, now);
    if (options.once) return {};
    if (std::fflush(stdout) != 0) return {};  // nobody reads it any more
    before = std::move(now);
    pause = interval;
  }
}

}  // namespace

void AddTopCommand(CommandSet& commands) {
  auto options = std::make_shared<TopFlags>();
  Command& command =
      commands.Add("top", "Show what mounts and daemons do now: reads, caches, snapshots");
  AddLiveOptions(command, options->live);
  command.Add("--interval", options->interval, "Seconds between two looks (default: 2)")
      .Value("SECONDS")
      .Check(Checked(ParseInterval));
  command.Add("--once", options->once, "Show one interval, and end");
  AddJsonOption(command, options->json);
  command.body = [options] { return RunTop(*options); };
}

}  // namespace ckptfs
