// SPDX-License-Identifier: Apache-2.0
//
// Copier is the seam over copies out of the memory that a training job computes
// in.  HostCopier is that of the host (training on CPUs, optimizers whose state lies
// there), CudaCopier (cuda_copier.h) that of CUDA devices and the host.
//
// Callers reuse the memory after an error: when one is
// returned, nothing that was enqueued is being copied any more.
//
// Thread safety: one thread at a time; TakeMoment, Follow and Pin also beside it, and the methods
// of marks.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "snapshot/device/device_pieces.h"

namespace ckptfs {

inline constexpr int kHost = -1;

struct MemoryCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;  // host memory
  uint64_t bytes = 0;
  int device = kHost;  // where `from` is: an ordinal as the process counts devices
};

// A queue of a device's work.
struct DeviceStream {
  int device = 0;
  uint64_t handle = 0;  // CUstream; 0: the default stream
  bool operator==(const DeviceStream&) const = default;
};

struct MemoryPiece {
  const std::byte* from = nullptr;
  uint64_t bytes = 0;
  int device = 0;
};

// The notes that devices take of their memory at one moment: these are there once the devices have
// come so far.  A caller may read them after it has waited for copies that followed.
struct DeviceMoment {
  std::vector<const DeviceDigest*> digests;  // in the order of the pieces
  // Where copies of the pieces that were to be taken are, on their devices, in their order; those
  // of one device lie one behind the other.  Empty: a device has no memory for them.
  std::vector<const std::byte*> taken;
  std::vector<std::shared_ptr<void>> memory;  // the memory that all this lies in
};

// A place in the queue of copies.
class CopyMark {
 public:
  CopyMark() = default;
  virtual ~CopyMark() = default;
  CopyMark(const CopyMark&) = delete;
  CopyMark& operator=(const CopyMark&) = delete;

  // True if all that was enqueued before it is in host memory.
  virtual Result<bool> IsOver() const = 0;
  // BLOCKS: until that is so.
  virtual Status Wait() const = 0;
};

// Says what the trainer's threads do meanwhile.  If they go on, they may
// give memory back that is being copied; then the copy is an error (kStale).
enum class Trainer { kWaits, kGoesOn };

class Copier {
 public:
  Copier() = default;
  virtual ~Copier() = default;
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Begins to digest pieces of devices' memory (PieceDigestOf), and to copy others on their
  // devices.  Both see all work that these streams have been given so far, and nothing
  // that they are given from now on.  kUnsupported where nothing can do so.
  virtual Result<DeviceMoment> TakeMoment(std::span<const MemoryPiece> digested,
                                          std::span<const MemoryPiece> taken,
                                          std::span<const DeviceStream> streams) = 0;
  // Makes copies that are enqueued from now on wait for
  // all work that these streams have been given so far.
  virtual Status Follow(std::span<const DeviceStream> streams) = 0;
  // Begins copies, many small ones together: those of a chunk are one call.
  virtual Status Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) = 0;
  // Waits for all that was enqueued to be in host memory.  BLOCKS: until it is.
  virtual Status Wait() = 0;
  // Marks what was enqueued so far, and makes all work that these streams are given from now
  // on wait for it, on the device.  kUnsupported where that cannot be: of the host's memory, of a
  // device of which there is no stream, while a stream's work is captured into a graph.
  virtual Result<std::shared_ptr<const CopyMark>> Mark(std::span<const DeviceStream> streams) = 0;
  // Makes copies into `memory` faster, out of all devices, for as long as the result is kept.
  // `device`: one that is used.  REQUIRES: the memory outlives the result.
  virtual Result<std::shared_ptr<const void>> Pin(std::span<std::byte> memory, int device) = 0;
};

// Returns what a device's digest of a piece is: XXH3-128, padded with zeros to kShortestPiece.
DeviceDigest PieceDigestOf(std::span<const std::byte> bytes);

// Copies of host memory.
Status CopyHostMemory(const MemoryCopy& copy, Trainer trainer);
Status CopyHostMemory(std::span<const MemoryCopy> copies, Trainer trainer);

class HostCopier final : public Copier {
 public:
  Result<DeviceMoment> TakeMoment(std::span<const MemoryPiece> digested,
                                  std::span<const MemoryPiece> taken,
                                  std::span<const DeviceStream> streams) override;
  Status Follow(std::span<const DeviceStream> streams) override;
  Status Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) override;
  Status Wait() override;
  Result<std::shared_ptr<const CopyMark>> Mark(std::span<const DeviceStream> streams) override;
  Result<std::shared_ptr<const void>> Pin(std::span<std::byte> memory, int device) override;
};

}  // namespace ckptfs
