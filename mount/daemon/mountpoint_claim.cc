// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/mountpoint_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>

#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "mount/fuse/mount_table.h"
#include "mount/logging.h"
#include "mount/shell_words.h"

namespace ckptfs {
namespace {

constexpr int kMaxClaimRaces = 100;

Error IsClaimed(const std::string& mountpoint) {
  return Error{ErrorCode::kExists,
               StrCat(mountpoint, ": another `ckptfs mount` is mounting there right now")};
}

bool IsNamed(const Descriptor& file, const std::string& path) {
  struct stat mine, named;
  return ::fstat(file.get(), &mine) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
}

}  // namespace

// The process that had the file may take it away between our two looks.
Result<MountpointClaim> MountpointClaim::Take(const std::string& mountpoint) {
  MountpointClaim claim(mountpoint);
  const auto runtime = SocketDirectory(true);
  if (!runtime) return claim;  // the control socket's start says why; the directory's lock is left
  const std::string path = StrCat(*runtime, "/", StoreSocketName(mountpoint), ".mounting");
  for (int race = 0; race < kMaxClaimRaces; ++race) {
    auto file = OpenDescriptor(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
    if (!file) return claim;
    if (::flock(file->get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) break;
      return claim;
    }
    if (!IsNamed(*file, path)) continue;
    claim.name_ = *std::move(file);
    claim.name_file_ = path;
    return claim;
  }
  return Fail(IsClaimed(mountpoint));
}

MountpointClaim::~MountpointClaim() {
  if (name_.valid()) ::unlink(name_file_.c_str());
}

Status MountpointClaim::TakeDirectory() {
  auto directory = OpenDescriptor(mountpoint_, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!directory) return {};  // a user who may not read it may mount there nevertheless
  if (::flock(directory->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return Fail(IsClaimed(mountpoint_));
  }
  directory_ = *std::move(directory);
  return {};
}

namespace {

// No mount of ours is there: the mount itself, if it is another's.
Result<std::optional<MountEntry>> FindForeignMount(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(auto entry, FindMount(path));
  if (!entry || entry->type != "fuse.ckptfs") return entry;
  return Fail(ErrorCode::kExists, StrCat(path, ": a ckptfs mount of ", entry->source,
                                         " is there already; run `ckptfs "
                                         "umount ",
                                         ShellWord(path), "` first"));
}

}  // namespace

Status PrepareMountpoint(const MountpointNeeds& needs, MountpointClaim& claim) {
  const std::string& path = needs.path;
  if (IsDeadMount(path)) {
    Log(LogLevel::kInfo, StrCat(path, ": the daemon of an earlier mount is gone; cleaning up"));
    CKPT_RETURN_IF_ERROR(UnmountLazily(path));
  }
  CKPT_RETURN_IF_ERROR(FindForeignMount(path));  // before anything is made
  std::error_code error;
  if (needs.mkdir) std::filesystem::create_directories(path, error);
  CKPT_RETURN_IF_ERROR(claim.TakeDirectory());
  CKPT_ASSIGN_OR_RETURN(const auto entry, FindForeignMount(path));  // nobody mounts from here on
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    return Fail(ErrnoError(errno, StrCat("mount point ", path, " (--mkdir makes it)")));
  }
  if (!S_ISDIR(info.st_mode)) return Fail(ErrorCode::kInvalid, StrCat(path, ": not a directory"));
  if (!entry && !needs.nonempty && !std::filesystem::is_empty(path, error) && !error) {
    return Fail(ErrorCode::kInvalid,
                StrCat(path,
                       ": not empty, and the mount would hide its files; name the mount "
                       "point last "
                       "(`ckptfs mount CHECKPOINT MOUNTPOINT`), or give --nonempty"));
  }
  for (const auto& [what, below] : needs.outside) {
    if (path != below && !below.starts_with(StrCat(path, "/"))) continue;
    return Fail(ErrorCode::kInvalid,
                StrCat(path, ": the ", what, " ", below, " must not lie under the mount point"));
  }
  return {};
}

}  // namespace ckptfs
