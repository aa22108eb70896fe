// SPDX-License-Identifier: Apache-2.0
//
// Descriptor owns an open file descriptor and closes it.
//
// Thread safety: as an int; moves are not synchronised.
// Lifetime: of the open file.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/result.h"

namespace ckptfs {

class Descriptor {
 public:
  Descriptor() = default;
  // OWNERSHIP: taken of `fd`; negative: none.
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // OWNERSHIP: passes to the caller.
  int Release() { return std::exchange(fd_, -1); }
  // The close that matters: network filesystems report late errors here.
  Status Close(std::string_view name);

 private:
  int fd_ = -1;
};

// open(2) with O_CLOEXEC; errors name the path.
Result<Descriptor> OpenDescriptor(const std::string& path, int flags, mode_t mode = 0);

// A process, readable when it has ended (a pidfd); none if there is no such process.
Descriptor OpenProcess(pid_t pid);

// All bytes at `offset` of a file; errors name the path.  BLOCKS: on the device.
Status WriteAll(int fd, uint64_t offset, std::span<const std::byte> bytes, const std::string& path);

// fsync(2) of a file or directory.  BLOCKS: on the device.
Status SyncPath(const std::string& path);

}  // namespace ckptfs
