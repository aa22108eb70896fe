// SPDX-License-Identifier: Apache-2.0

#include "core/io/sealed_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace ckptfs {

SealedMemory::SealedMemory(Descriptor descriptor, std::byte* at, size_t size)
    : descriptor_(std::move(descriptor)), at_(at), size_(size) {}

SealedMemory::SealedMemory(SealedMemory&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      at_(std::exchange(other.at_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SealedMemory::~SealedMemory() {
  if (at_ != nullptr) munmap(at_, size_);
}

Result<SealedMemory> SealedMemory::Make(uint64_t bytes, const std::string& name) {
  Descriptor descriptor(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.valid()) return Fail(ErrnoError(errno, name));
  if (bytes == 0) return SealedMemory(std::move(descriptor), nullptr, 0);
  // Memory that is missing is an error here, and not a signal when it is touched.
  if (fallocate(descriptor.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    return Fail(ErrorCode::kExhausted, ErrnoError(errno, name).message);
  }
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  if (at == MAP_FAILED) return Fail(ErrnoError(errno, name));
  return SealedMemory(std::move(descriptor), static_cast<std::byte*>(at), bytes);
}

Status SealedMemory::Seal() {
  if (at_ != nullptr) munmap(std::exchange(at_, nullptr), size_);
  if (fcntl(descriptor_.get(), F_ADD_SEALS,
            F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Fail(ErrnoError(errno, "sealed memory"));
  }
  if (size_ == 0) return {};
  void* const at = mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor_.get(), 0);
  if (at == MAP_FAILED) return Fail(ErrnoError(errno, "sealed memory"));
  at_ = static_cast<std::byte*>(at);
  return {};
}

}  // namespace ckptfs
