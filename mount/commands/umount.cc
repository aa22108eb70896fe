// SPDX-License-Identifier: Apache-2.0

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/control_client.h"
#include "mount/mount_table.h"

namespace ckptfs {
namespace {

constexpr int kEndMilliseconds = 30'000;

struct UmountFlags {
  std::string mountpoint;
  bool lazy = false;
};

// A descriptor that becomes readable when the daemon has ended, or -1.
int DaemonOf(const std::string& mountpoint) {
  for (const LiveMount& mount : FindLiveMounts("")) {
    if (mount.mountpoint == mountpoint && mount.pid > 0) {
      return static_cast<int>(::syscall(SYS_pidfd_open, mount.pid, 0));
    }
  }
  return -1;
}

// The daemon writes its last words and frees its memory after the unmount.
Status WaitForDaemon(int daemon) {
  if (daemon < 0) return {};
  pollfd event{daemon, POLLIN, 0};
  const int ready = ::poll(&event, 1, kEndMilliseconds);
  ::close(daemon);
  if (ready == 1) return {};
  return Fail(ErrorCode::kExists, "unmounted, but the daemon has not ended after 30 s");
}

Status RunUmount(const UmountFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, MountpointPath(options.mountpoint));
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindMount(path));
  if (!entry || entry->type != "fuse.ckptfs") {
    return Fail(ErrorCode::kNotFound, StrCat(path, ": no ckptfs is mounted there"));
  }
  const bool dead = IsDeadMount(path);
  const int daemon = dead || options.lazy ? -1 : DaemonOf(path);
  Status done = dead || options.lazy ? UnmountLazily(path) : Unmount(path);
  if (!done) {
    if (daemon >= 0) ::close(daemon);
    return done;
  }
  return WaitForDaemon(daemon);
}

}  // namespace

void AddUmountCommand(CommandSet& commands) {
  auto options = std::make_shared<UmountFlags>();
  Command& command = commands.Add("umount", "Unmount, and wait until the daemon has ended");
  command.Add("MOUNTPOINT", options->mountpoint, "Where it is mounted").Required();
  command.Add("--lazy", options->lazy, "Detach now though files are open");
  command.body = [options] { return RunUmount(*options); };
}

}  // namespace ckptfs
