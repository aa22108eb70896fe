// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/mountpoint_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/runtime_directory.h"
#include "core/base/strings.h"

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

}  // namespace ckptfs
