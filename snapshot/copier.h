// SPDX-License-Identifier: Apache-2.0
//
// Copier is the seam over copies out of the memory that a training job computes
// in.  HostCopier is that of the host (training on CPUs, optimizers whose state lies
// there).
//
// Whoever gets an error reuses the memory: when one is returned, nothing that was
// enqueued is being copied any more.
//
// Thread safety: one thread at a time.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/result.h"

namespace ckptfs {

struct MemoryCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;  // host memory
  uint64_t bytes = 0;
};

class Copier {
 public:
  Copier() = default;
  virtual ~Copier() = default;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Begins copies, many small ones together: those of a chunk are one call.
  virtual Status Enqueue(std::span<const MemoryCopy> copies) = 0;
  // All that was enqueued is in host memory.  BLOCKS: until it is.
  virtual Status Wait() = 0;
};

class HostCopier final : public Copier {
 public:
  Status Enqueue(std::span<const MemoryCopy> copies) override;
  Status Wait() override;
};

}  // namespace ckptfs
