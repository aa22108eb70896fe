// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "mount/commands/command_set.h"
#include "mount/control/daemon_record.h"
#include "mount/fuse/mount_table.h"
#include "mount/fuse/mount_users.h"
#include "mount/printable.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

constexpr int kSoonMilliseconds = 200;  // an idle daemon's end
constexpr int kEndMilliseconds = 30'000;

struct UmountFlags {
  std::string mountpoint;
  bool lazy = false;
};

// Becomes readable when the daemon has ended; none if there is none of this user's.  It is not
// asked: a user may unmount because it does not answer.
Descriptor DaemonOf(const std::string& mountpoint) {
  for (const DaemonFacts& daemon : FindDaemonRecords("")) {
    if (daemon.mountpoint == mountpoint && IsAlive(daemon)) {
      return OpenProcess(daemon.pid);
    }
  }
  return {};
}

// Where else in this namespace the file system is mounted.
std::vector<std::string> OtherPlaces(const std::string& device) {
  std::vector<std::string> places;
  const auto mounts = ReadMounts();
  for (const MountEntry& mount : mounts ? *mounts : std::vector<MountEntry>()) {
    if (mount.device == device && mount.type == "fuse.ckptfs") places.push_back(mount.mountpoint);
  }
  return places;
}

// Names, in words, the processes that still have the file system that was unmounted here; ""
// if none is seen.  The kernel ends the daemon with the last of its mounts.
std::string StillServed(const std::string& device) {
  if (const auto places = OtherPlaces(device); !places.empty()) {
    return StrCat(places.front(),
                  " shows the same mount: the daemon serves it until that is "
                  "unmounted, too");
  }
  const std::vector<MountUser> holders = FindMountHolders(device);
  if (holders.empty()) return "";
  const bool one = holders.size() == 1;
  return StrCat(DescribeUsers(holders), one ? " has" : " have", " it in a mount namespace of ",
                one ? "its" : "their", " own: the daemon serves ",
                one ? "it until it ends" : "them until they end");
}

// The daemon writes its last words and frees its memory after the unmount.
Status WaitForDaemon(const Descriptor& daemon, const MountEntry& mount) {
  if (!daemon.valid() || EndsWithin(daemon, kSoonMilliseconds)) return {};
  if (const std::string why = StillServed(mount.device); !why.empty()) {
    fmt::print(stderr, "ckptfs: {}: unmounted here; {}\n", Printable(mount.mountpoint),
               Printable(why));
    return {};
  }
  if (EndsWithin(daemon, kEndMilliseconds)) return {};
  return Fail(ErrorCode::kExists,
              "unmounted, but the daemon has not ended after 30 s; none of the processes that this "
              "user may look at has the mount in a namespace of its own (root sees all)");
}

// Mounts in the mount.
std::vector<std::string> MountsBelow(const std::string& path) {
  std::vector<std::string> below;
  const auto mounts = ReadMounts();
  for (const MountEntry& mount : mounts ? *mounts : std::vector<MountEntry>()) {
    if (mount.mountpoint.starts_with(path + "/")) below.push_back(mount.mountpoint);
  }
  return below;
}

// Names the processes that keep the mount busy.
Status Busy(const std::string& path, Error error) {
  if (const auto below = MountsBelow(path); !below.empty()) {
    error.message = StrCat(path, ": ", below.front(), " is mounted in it; unmount that first");
    return Fail(std::move(error));
  }
  const std::vector<MountUser> users = FindMountUsers(path);
  if (users.empty()) {
    error.message +=
        "; none of the processes that this user may look at has them open (root sees "
        "all)";
  } else {
    error.message = StrCat(path, ": in use by ", DescribeUsers(users),
                           "; end them, or `ckptfs umount --lazy ", ShellWord(path), "`");
  }
  return Fail(std::move(error));
}

// Removes what a killed daemon has left beside the mount.
void RemoveRecords(const std::string& path) {
  for (const DaemonFacts& daemon : FindDaemonRecords("")) {
    if (daemon.mountpoint == path && !IsAlive(daemon)) RemoveDaemonRecord(daemon);
  }
}

Status RunUmount(const UmountFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, MountpointPath(options.mountpoint));
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindMount(path));
  if (!entry || entry->type != "fuse.ckptfs") {
    return Fail(ErrorCode::kNotFound, StrCat(path, ": no ckptfs is mounted there"));
  }
  const Descriptor daemon = DaemonOf(path);
  const bool dead = !daemon.valid() && IsDeadMount(path);
  Status done = dead || options.lazy ? UnmountLazily(path) : Unmount(path);
  if (!done && done.error().code == ErrorCode::kExists) return Busy(path, std::move(done).error());
  CKPT_RETURN_IF_ERROR(done);
  if (dead) RemoveRecords(path);
  return options.lazy ? Status() : WaitForDaemon(daemon, *entry);
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
