// SPDX-License-Identifier: Apache-2.0

#include "tests/support/watched_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <map>

#include "core/base/mutex.h"

namespace ckptfs {
namespace {

struct Watch {
  Mutex mutex;
  bool active GUARDED_BY(mutex) = false;
  uint64_t fail_at GUARDED_BY(mutex) = 0;
  uint64_t fail_to GUARDED_BY(mutex) = 0;  // the last that does
  uint64_t most_written GUARDED_BY(mutex) = UINT64_MAX;
  std::vector<SystemCall> calls GUARDED_BY(mutex);
  std::optional<SystemCall> failed GUARDED_BY(mutex);
  std::map<const DIR*, std::string> directories GUARDED_BY(mutex);
};

Watch& TheWatch() {
  static Watch watch;
  return watch;
}

std::string PathOf(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  std::array<char, PATH_MAX> target{};
  const auto length =
      static_cast<ssize_t>(::syscall(SYS_readlink, link.c_str(), target.data(), target.size()));
  return length > 0 ? std::string(target.data(), static_cast<size_t>(length)) : "";
}

bool IsActive() {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  return watch.active;
}

// True if this call is to fail.
bool Enter(SystemCall call) {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  if (!watch.active) return false;
  watch.calls.push_back(call);
  const uint64_t number = watch.calls.size();
  if (watch.fail_at == 0 || number < watch.fail_at || number > watch.fail_to) return false;
  if (!watch.failed) watch.failed = std::move(call);
  errno = EIO;
  return true;
}

uint64_t MostWritten() {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  return watch.active ? watch.most_written : UINT64_MAX;
}

void Remember(const DIR* directory, const char* path) {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  watch.directories[directory] = path;
}

std::string PathOf(const DIR* directory) {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  return watch.directories[directory];
}

}  // namespace

WatchedIo::WatchedIo(uint64_t fail_at, Faults faults) {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  watch.active = true;
  watch.fail_at = fail_at;
  watch.fail_to = faults == Faults::kOne ? fail_at : UINT64_MAX;
  watch.most_written = UINT64_MAX;
  watch.calls.clear();
  watch.failed.reset();
}

WatchedIo::~WatchedIo() {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  watch.active = false;
}

void WatchedIo::WriteAtMost(uint64_t bytes) {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  watch.most_written = bytes;
}

std::vector<SystemCall> WatchedIo::calls() const {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  return watch.calls;
}

std::optional<SystemCall> WatchedIo::failed() const {
  Watch& watch = TheWatch();
  MutexLock lock(watch.mutex);
  return watch.failed;
}

}  // namespace ckptfs

// Functions that ld --wrap puts in the place of the C library's.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" {

DIR* __real_opendir(const char* path);
dirent* __real_readdir(DIR* directory);
int __real_stat(const char* path, struct stat* info);
int __real_lstat(const char* path, struct stat* info);
int __real_fstat(int fd, struct stat* info);
ssize_t __real_pread(int fd, void* out, size_t length, off_t offset);
ssize_t __real_preadv2(int fd, const struct iovec* out, int count, off_t offset, int flags);
ssize_t __real_readlinkat(int fd, const char* path, char* out, size_t length);
int __real_fstatat(int fd, const char* path, struct stat* info, int flags);
ssize_t __real_pwrite(int fd, const void* bytes, size_t length, off_t offset);
int __real_fsync(int fd);
int __real_rename(const char* from, const char* to);
int __real_link(const char* from, const char* to);
int __real_mkdir(const char* path, mode_t mode);

DIR* __wrap_opendir(const char* path) {
  if (ckptfs::Enter({"opendir", path})) return nullptr;
  DIR* directory = __real_opendir(path);
  if (directory != nullptr) ckptfs::Remember(directory, path);
  return directory;
}

dirent* __wrap_readdir(DIR* directory) {
  if (ckptfs::Enter({"readdir", ckptfs::PathOf(directory)})) return nullptr;
  return __real_readdir(directory);
}

int __wrap_stat(const char* path, struct stat* info) {
  if (ckptfs::Enter({"stat", path})) return -1;
  return __real_stat(path, info);
}

int __wrap_lstat(const char* path, struct stat* info) {
  if (ckptfs::Enter({"lstat", path})) return -1;
  return __real_lstat(path, info);
}

int __wrap_fstat(int fd, struct stat* info) {
  if (ckptfs::Enter({"fstat", ckptfs::PathOf(fd)})) return -1;
  return __real_fstat(fd, info);
}

ssize_t __wrap_pread(int fd, void* out, size_t length, off_t offset) {
  if (ckptfs::Enter({"pread", ckptfs::PathOf(fd), static_cast<uint64_t>(offset), length}))
    return -1;
  return __real_pread(fd, out, length, offset);
}

// No byte of a watched file counts as in memory, so that all of it comes through pread.
ssize_t __wrap_preadv2(int fd, const struct iovec* out, int count, off_t offset, int flags) {
  if (!ckptfs::IsActive()) return __real_preadv2(fd, out, count, offset, flags);
  errno = EAGAIN;
  return -1;
}

ssize_t __wrap_readlinkat(int fd, const char* path, char* out, size_t length) {
  if (ckptfs::Enter({"readlinkat", path})) return -1;
  return __real_readlinkat(fd, path, out, length);
}

int __wrap_fstatat(int fd, const char* path, struct stat* info, int flags) {
  if (ckptfs::Enter({"fstatat", path})) return -1;
  return __real_fstatat(fd, path, info, flags);
}

ssize_t __wrap_pwrite(int fd, const void* bytes, size_t length, off_t offset) {
  if (ckptfs::Enter({"pwrite", ckptfs::PathOf(fd), static_cast<uint64_t>(offset), length}))
    return -1;
  return __real_pwrite(fd, bytes, std::min<uint64_t>(length, ckptfs::MostWritten()), offset);
}

int __wrap_fsync(int fd) {
  if (ckptfs::Enter({"fsync", ckptfs::PathOf(fd)})) return -1;
  return __real_fsync(fd);
}

int __wrap_rename(const char* from, const char* to) {
  if (ckptfs::Enter({"rename", to})) return -1;
  return __real_rename(from, to);
}

int __wrap_link(const char* from, const char* to) {
  if (ckptfs::Enter({"link", to})) return -1;
  return __real_link(from, to);
}

int __wrap_mkdir(const char* path, mode_t mode) {
  if (ckptfs::Enter({"mkdir", path})) return -1;
  return __real_mkdir(path, mode);
}

}  // extern "C"
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
