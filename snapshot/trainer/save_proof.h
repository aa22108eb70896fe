// SPDX-License-Identifier: Apache-2.0
//
// SaveProof says whether what was copied late is what was there at the save.  It watches
// host memory page by page (write_watch.h).  Devices digest their memory before anything
// else can write it (Copier::TakeMoment).  Other memory is compared at a few places
// (source_samples.h) or not at all.  This is not a proof: unproved_bytes() is how much.
//
// Thread safety: none; begun by the thread that saves, then the copying thread's.
// Lifetime: a value of its save; the memory has to be there until the end of it.
// Units: bytes of the rank's file.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/base/digest.h"
#include "snapshot/device/copier.h"
#include "snapshot/trainer/capture.h"
#include "snapshot/trainer/source_samples.h"
#include "snapshot/trainer/taken_runs.h"
#include "snapshot/trainer/write_watch.h"

namespace ckptfs {

class SaveProof {
 public:
  // Sees writes from now on.  Bytes of the file beside the watched pages are not lazy any more.
  void Begin(CaptureFile& file);
  // Begins to digest the devices' memory that is copied late, and to take what is small and cannot
  // wait, on the capture's streams, as it is after what they do now.  `chunk_bytes`: no piece
  // lies in two chunks of so many bytes.  kUnsupported: nothing was digested nor taken.
  Status BeginDevices(const CaptureFile& file, uint64_t chunk_bytes, Copier& copier);

  // Returns the first byte of the file, in what was copied for [begin, begin + copied.size()),
  // that may not be of the moment of the save.  `copies` are those into `copied`.
  std::optional<uint64_t> FindChange(uint64_t begin, std::span<const std::byte> copied,
                                     std::span<const MemoryCopy> copies) const;
  // The same of devices' memory, when all copies have arrived, and the digest of `copied`: both of
  // a piece while it is in the processor's cache.
  struct Compared {
    std::optional<uint64_t> changed;
    Digest digest;
  };
  Compared DigestAndCompare(uint64_t begin, std::span<const std::byte> copied) const;
  // Says that these were copied, and may be written.  Not while an update waits: End is quicker.
  void Release(std::span<const MemoryCopy> copies) const;
  // All is copied.
  void Leave() const {
    if (watch_) watch_->Leave();
  }
  // Nothing is protected any more.
  void End() { watch_.reset(); }
  // The memory that devices took aside when the save was called.
  const TakenRuns& taken() const { return taken_; }
  // True if all that is copied late lies on devices, and is proved: whoever writes too early costs
  // the save, and the host need not wait for its copies.
  bool is_of_devices() const { return of_devices_; }
  // Returns how many bytes of what is copied late only samples, or nothing, speak for.
  uint64_t unproved_bytes() const { return unproved_; }

 private:
  SourceSamples samples_;
  std::unique_ptr<WriteWatch> watch_;
  uint64_t unproved_ = 0;
  struct Piece {
    uint64_t at = 0;
    uint64_t bytes = 0;
  };
  std::vector<Piece> pieces_;  // of devices' memory, rising
  DeviceMoment moment_;        // the digest of each
  TakenRuns taken_;
  bool of_devices_ = false;
};

}  // namespace ckptfs
