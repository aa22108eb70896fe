// SPDX-License-Identifier: Apache-2.0

#include "core/base/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "core/base/strings.h"

namespace ckptfs {

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

Status SyncPath(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 || ::fsync(file.get()) != 0) return Fail(ErrnoError(errno, path));
  return {};
}

}  // namespace ckptfs
