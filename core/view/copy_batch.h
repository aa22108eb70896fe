// SPDX-License-Identifier: Apache-2.0
//
// CopyBatch collects copies out of blobs and does them together: what is not
// in the page cache is asked for all at once (neighbours in one request)
// before the first byte is touched, so the device sees a deep queue, and one
// guard against bus errors serves the whole batch.  Copies out of blobs that
// cannot be mapped go through the blocks of the reader's cache (far_copies.h).
//
// Thread safety: none; one per read.
// Lifetime: reader, conversions and destinations must outlive Flush.
// Units: offsets are bytes of the blob; strides and counts are elements.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/tensor/conversion.h"
#include "core/view/far_copies.h"

namespace ckptfs {

class CopyBatch {
 public:
  explicit CopyBatch(BlobReader& blobs) : blobs_(blobs), far_(blobs) {}

  // Flushes by itself when full.  kDataLoss if the elements are not in the
  // blob; the errors of BlobReader::Hold.
  // BLOCKS: when it flushes.
  Status Add(BlobIndex blob, uint64_t offset, uint64_t source_stride, std::byte* destination,
             uint64_t destination_stride, uint64_t count, const Conversion& conversion);

  // Do all copies.  BLOCKS: on the device.
  Status Flush();

 private:
  static constexpr size_t kMaxCopies = 256;
  static constexpr size_t kMaxHeld = 64;

  struct Copy {
    const std::byte* source;
    std::byte* destination;
    uint64_t source_stride;
    uint64_t destination_stride;
    uint64_t count;
    uint64_t extent;  // source bytes from first to last
    const Conversion* conversion;
    uint32_t held;  // into held_
  };

  Status Hold(BlobIndex blob);
  void RunCopies();
  bool LooksCold() const;
  void PrefetchAll() const;
  Error FaultAt(const std::byte* address) const;

  BlobReader& blobs_;
  size_t copy_count_ = 0;
  size_t held_count_ = 0;
  uint64_t bytes_ = 0;
  std::array<std::shared_ptr<const BlobReader::Held>, kMaxHeld> held_;
  std::array<Copy, kMaxCopies> copies_;
  FarCopies far_;
};

}  // namespace ckptfs
