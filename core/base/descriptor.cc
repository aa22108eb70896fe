// SPDX-License-Identifier: Apache-2.0

#include "core/base/descriptor.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxWrite = size_t{1} << 30;  // per system call

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Status Descriptor::Close(std::string_view name) {
  if (fd_ >= 0 && ::close(Release()) != 0) return Fail(ErrnoError(errno, StrCat("close ", name)));
  return {};
}

Result<Descriptor> OpenDescriptor(const std::string& path, int flags, mode_t mode) {
  Descriptor opened(::open(path.c_str(), flags | O_CLOEXEC, mode));
  if (!opened.valid()) return Fail(ErrnoError(errno, StrCat("open ", path)));
  return opened;
}

Descriptor OpenProcess(pid_t pid) {
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

Status WriteAll(int fd, uint64_t offset, std::span<const std::byte> bytes,
                const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pwrite(fd, bytes.data(), std::min(bytes.size(), kMaxWrite), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Fail(ErrnoError(errno, StrCat("write ", path)));
    // It would be asked for ever.
    if (n == 0) return Fail(ErrorCode::kIo, StrCat("write ", path, ": nothing was written"));
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return {};
}

Status SyncPath(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const Descriptor file, OpenDescriptor(path, O_RDONLY));
  if (::fsync(file.get()) != 0) return Fail(ErrnoError(errno, StrCat("fsync ", path)));
  return {};
}

}  // namespace ckptfs
