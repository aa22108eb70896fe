// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/commands/live.h"
#include "mount/control/daemon_record.h"
#include "mount/daemon/mount_handover.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

constexpr std::chrono::minutes kMost{10};  // follow services end their copies first
constexpr std::chrono::milliseconds kPause{20};

struct UpgradeFlags {
  LiveOptions live;
  std::string program;
  uint64_t accepts = 0;  // of another program: can this one take its place?
};

Result<std::string> ProgramOf(const UpgradeFlags& options) {
  if (!options.program.empty()) return AbsolutePath(options.program);
  std::error_code error;
  const std::filesystem::path own = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return Fail(ErrnoError(error.value(), "/proc/self/exe"));
  return own.string();
}

// The mount as its next program serves it.  BLOCKS: until that answers.
Result<LiveMount> WaitForNext(const LiveMount& before, const Descriptor& process) {
  const auto deadline = std::chrono::steady_clock::now() + kMost;
  while (std::chrono::steady_clock::now() < deadline) {
    for (const LiveMount& now : FindLiveMounts(before.store)) {
      if (now.mountpoint == before.mountpoint && now.generation > before.generation) return now;
    }
    if (EndsWithin(process, 0)) {
      return Fail(ErrorCode::kIo,
                  StrCat(before.mountpoint, ": the daemon ended; its log says why"));
    }
    std::this_thread::sleep_for(kPause);
  }
  return Fail(ErrorCode::kIo,
              StrCat(before.mountpoint, ": the next program does not answer after ten minutes"));
}

Status UpgradeOne(const LiveMount& mount, const std::string& program) {
  const Descriptor process = OpenProcess(mount.pid);
  const auto done = AskDaemon(mount, "upgrade", {{"program", program}});
  if (!done) return Fail(Error(done.error()).WithContext(mount.mountpoint));
  CKPT_ASSIGN_OR_RETURN(const LiveMount now, WaitForNext(mount, process));
  fmt::print("{}: ckptfs {} serves it now, after {} (pid {})\n", Printable(mount.mountpoint),
             Printable(now.version), Printable(mount.version), now.pid);
  return {};
}

Status Accept(uint64_t version) {
  if (version != kMountStateVersion) return ExitWith(1);
  fmt::print("{}", kAcceptance);
  return {};
}

Status RunUpgrade(const UpgradeFlags& options) {
  if (options.accepts != 0) return Accept(options.accepts);
  CKPT_ASSIGN_OR_RETURN(const std::string program, ProgramOf(options));
  CKPT_ASSIGN_OR_RETURN(const std::vector<LiveMount> mounts, ChooseAnswering(options.live));
  for (const LiveMount& mount : mounts) CKPT_RETURN_IF_ERROR(UpgradeOne(mount, program));
  return {};
}

}  // namespace

void AddUpgradeCommand(CommandSet& commands) {
  auto options = std::make_shared<UpgradeFlags>();
  Command& command =
      commands.Add("upgrade", "Have this program serve live mounts, with the files that are open");
  AddLiveOptions(command, options->live);
  command.Add("--program", options->program, "Have that program serve them").Value("FILE");
  command
      .Add("--accepts", options->accepts,
           "Only say whether this program takes over from one whose mount's state has that version")
      .Value("VERSION")
      .Check(Checked(ParseCount));
  command.body = [options] { return RunUpgrade(*options); };
}

}  // namespace ckptfs
