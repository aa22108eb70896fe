// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/mount_table.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <filesystem>

#include "core/base/descriptor.h"
#include "core/base/strings.h"
#include "mount/options.h"

extern char** environ;

namespace ckptfs {
namespace {

// fusermount3 is setuid: it unmounts for the user who mounted.
Status RunFusermount(const std::string& mountpoint, bool lazily) {
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindMount(mountpoint));
  const auto user = entry ? UserOf(*entry) : std::nullopt;
  if (user && *user != ::geteuid()) {
    return Fail(ErrorCode::kPermission, StrCat(mountpoint, ": user ", *user,
                                               " mounted it; that user or root can unmount it"));
  }
  std::string program = "fusermount3";
  std::string flags = lazily ? "-uzq" : "-uq";
  std::string end = "--";
  std::string where = mountpoint;
  char* words[] = {program.data(), flags.data(), end.data(), where.data(), nullptr};
  pid_t child = 0;
  if (const int error = ::posix_spawnp(&child, program.c_str(), nullptr, nullptr, words, environ)) {
    return Fail(ErrnoError(error, "running fusermount3"));
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  return Fail(ErrorCode::kExists, StrCat(mountpoint,
                                         ": fusermount3 could not unmount it; are files "
                                         "in it still open (umount --lazy)?"));
}

Status UnmountWith(const std::string& mountpoint, int flags) {
  if (::umount2(mountpoint.c_str(), flags | UMOUNT_NOFOLLOW) == 0) return {};
  if (errno == EPERM) return RunFusermount(mountpoint, (flags & MNT_DETACH) != 0);
  if (errno == EBUSY) {
    return Fail(ErrorCode::kExists, StrCat(mountpoint,
                                           ": files in it are still open; close them or "
                                           "use umount --lazy"));
  }
  return Fail(ErrnoError(errno, StrCat("unmounting ", mountpoint)));
}

}  // namespace

bool LiesIn(const std::string& directory, const std::string& path) {
  return path == directory || path.starts_with(directory == "/" ? directory : directory + "/");
}

std::optional<uint32_t> UserOf(const MountEntry& mount) {
  const auto text = MountOption(mount.options, "user_id");
  uint32_t user = 0;
  if (!text || std::from_chars(text->data(), text->data() + text->size(), user).ec != std::errc()) {
    return std::nullopt;
  }
  return user;
}

Result<std::optional<MountEntry>> FindMount(const std::string& mountpoint) {
  CKPT_ASSIGN_OR_RETURN(std::vector<MountEntry> entries, ReadMounts());
  std::optional<MountEntry> found;
  for (MountEntry& entry : entries) {
    if (entry.mountpoint == mountpoint) found = std::move(entry);
  }
  return found;
}

Result<std::string> MountpointPath(const std::string& path) {
  std::error_code error;
  std::filesystem::path given = std::filesystem::absolute(path, error).lexically_normal();
  if (!given.has_filename()) given = given.parent_path();  // a trailing slash
  CKPT_ASSIGN_OR_RETURN(std::string candidate, AbsolutePath(given.parent_path().string()));
  const std::string name = given.filename().string();
  if (!name.empty()) candidate += (candidate == "/" ? "" : "/") + name;
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindMount(candidate));
  if (entry && entry->type == "fuse.ckptfs") return candidate;
  return AbsolutePath(path);
}

bool IsDeadMount(const std::string& mountpoint) {
  const auto entry = FindMount(mountpoint);
  if (!entry || !*entry || (*entry)->type != "fuse.ckptfs") return false;
  struct statx info {};  // of the daemon: the kernel may have attributes of a dead one for a moment
  return ::statx(AT_FDCWD, mountpoint.c_str(), AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &info) !=
             0 &&
         (errno == ENOTCONN || errno == ECONNABORTED);
}

Status Unmount(const std::string& mountpoint) { return UnmountWith(mountpoint, 0); }

Status UnmountLazily(const std::string& mountpoint) { return UnmountWith(mountpoint, MNT_DETACH); }

Status SetReadAhead(const std::string& mountpoint, uint64_t kibibytes) {
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindMount(mountpoint));
  if (!entry) return Fail(ErrorCode::kNotFound, StrCat(mountpoint, ": not mounted"));
  const std::string knob = StrCat("/sys/class/bdi/", entry->device, "/read_ahead_kb");
  const std::string value = std::to_string(kibibytes);
  const Descriptor file(::open(knob.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.valid() &&
      ::write(file.get(), value.data(), value.size()) == static_cast<ssize_t>(value.size())) {
    return {};
  }
  return Fail(
      ErrnoError(errno, StrCat("read-ahead stays at the kernel's default, which makes first "
                               "reads slower; as root: echo ",
                               value, " > ", knob)));
}

}  // namespace ckptfs
