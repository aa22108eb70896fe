// SPDX-License-Identifier: Apache-2.0
#include "core/store/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ckptfs {

Result<MappedFile> MappedFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Fail(ErrnoError(errno, "open " + path));
  struct stat status;
  if (fstat(fd, &status) != 0) {
    const Error error = ErrnoError(errno, "stat " + path);
    close(fd);
    return Fail(error);
  }
  const auto size = static_cast<size_t>(status.st_size);
  void* address = nullptr;
  if (size > 0) address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
  const int error_number = errno;
  close(fd);
  if (address == MAP_FAILED) return Fail(ErrnoError(error_number, "map " + path));
  return MappedFile(address, size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (address_ != nullptr) munmap(address_, size_);
}

}  // namespace ckptfs
