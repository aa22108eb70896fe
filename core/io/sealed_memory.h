// SPDX-License-Identifier: Apache-2.0
//
// SealedMemory is memory that is written once: a memfd which nobody can write, cut or grow any
// more after Seal.
//
// Thread safety: one thread until it is sealed; then any.
// Lifetime: moves; the memory ends with it.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/base/descriptor.h"
#include "core/base/result.h"

namespace ckptfs {

class SealedMemory {
 public:
  // Makes memory, all of it allocated.  kExhausted if there is not as much.
  // BLOCKS: on the kernel, seconds for gigabytes.
  static Result<SealedMemory> Make(uint64_t bytes, const std::string& name);
  SealedMemory(SealedMemory&& other) noexcept;
  SealedMemory& operator=(SealedMemory&&) = delete;
  ~SealedMemory();

  // From now on it is read only.
  Status Seal();
  // REQUIRES: it is not sealed.
  std::span<std::byte> room() const { return {at_, size_}; }
  std::span<const std::byte> bytes() const { return {at_, size_}; }

 private:
  SealedMemory(Descriptor descriptor, std::byte* at, size_t size);
  Descriptor descriptor_;
  std::byte* at_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ckptfs
