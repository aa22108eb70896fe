// SPDX-License-Identifier: Apache-2.0

#include "core/base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>

namespace ckptfs {

std::unique_ptr<const FileLock> FileLock::Take(const std::string& path, int flags, int operation) {
  auto file = OpenDescriptor(path, flags | O_NOFOLLOW | O_NONBLOCK);
  if (!file) return nullptr;
  auto lock = std::make_unique<const FileLock>(*std::move(file));
  int locked = 0;
  do {
    locked = flock(lock->fd(), operation);
  } while (locked != 0 && errno == EINTR);
  const bool shared = (operation & LOCK_SH) != 0;
  if (locked != 0 && (!shared || errno == EWOULDBLOCK)) return nullptr;
  struct stat mine, named;
  const bool same = fstat(lock->fd(), &mine) == 0 && lstat(path.c_str(), &named) == 0 &&
                    mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
  return same ? std::move(lock) : nullptr;
}

}  // namespace ckptfs
