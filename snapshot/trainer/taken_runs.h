// SPDX-License-Identifier: Apache-2.0
//
// TakenRuns are the small tensors of devices that cannot be copied late: buffers, single
// numbers, biases.  Each device copies its own side by side into memory of ours when the save
// is called (Copier::TakeMoment), in the order of its other work.  So the save does not wait
// for the device, and one copy to the host brings many of them.
//
// Thread safety: const methods may be called concurrently.
// Lifetime: a value of its save, which keeps the devices' memory (DeviceMoment::memory).
// Units: bytes of the rank's file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "snapshot/device/copier.h"
#include "snapshot/trainer/capture.h"

namespace ckptfs {

// As much of a device's memory is used for a save at most, and for one tensor of it.
inline constexpr uint64_t kMostTaken = uint64_t{64} << 20;
inline constexpr uint64_t kLargestTaken = uint64_t{1} << 20;

class TakenRuns {
 public:
  TakenRuns() = default;
  explicit TakenRuns(const CaptureFile& file);

  bool empty() const { return pieces_.empty(); }
  // Where they lie in the trainer's memory, in the order of the file.
  std::span<const MemoryPiece> pieces() const { return pieces_; }
  // Says where the devices have copied them; empty: nowhere, and there are none.
  void Place(std::span<const std::byte* const> taken);
  // True if the byte of the file belongs to one.
  bool Has(uint64_t at) const;
  // Returns those in [begin, end) of the file, in order; what lies side by side on both sides is
  // one run.
  std::vector<CopyRun> Runs(uint64_t begin, uint64_t end) const;

 private:
  const CopyRun* Find(uint64_t at) const;
  std::vector<MemoryPiece> pieces_;
  std::vector<CopyRun> runs_;  // rising, apart
};

}  // namespace ckptfs
