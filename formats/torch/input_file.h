// SPDX-License-Identifier: Apache-2.0
//
// InputFile reads ranges of a regular file with pread: a file that shrinks
// while it is read is an error, never a signal.
//
// Thread safety: Read may be called concurrently.
// Lifetime: owns its descriptor.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>

#include "core/base/result.h"

namespace ckptfs {

class InputFile {
 public:
  // kInvalid if it is no regular file.
  static Result<InputFile> Open(const std::string& path);
  InputFile(InputFile&& other) noexcept : fd_(other.fd_), size_(other.size_) { other.fd_ = -1; }
  InputFile& operator=(InputFile&&) = delete;
  ~InputFile();

  uint64_t size() const { return size_; }  // when opened

  // Exactly `length` bytes at `offset`; kInvalid, naming `what`, if the file
  // does not have them.  BLOCKS: on the device.
  Result<std::string> Read(uint64_t offset, uint64_t length, std::string_view what) const;

 private:
  InputFile(int fd, uint64_t size) : fd_(fd), size_(size) {}
  int fd_ = -1;
  uint64_t size_ = 0;
};

}  // namespace ckptfs
