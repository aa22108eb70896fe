// SPDX-License-Identifier: Apache-2.0
//
// PrefetchRequests joins neighbouring ranges of a blob and starts reading each
// joined one into its cache.
//
// Thread safety: none; one per read.
// Lifetime: the reader must outlive it; the last range is asked for at its end.
// Units: bytes of the blob.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/blob/blob_reader.h"

namespace ckptfs {

class PrefetchRequests {
 public:
  explicit PrefetchRequests(BlobReader& blobs) : blobs_(blobs) {}
  ~PrefetchRequests();
  PrefetchRequests(const PrefetchRequests&) = delete;
  PrefetchRequests& operator=(const PrefetchRequests&) = delete;

  // Only a hint: what cannot be read ahead fails when it is copied.
  void Add(BlobIndex blob, uint64_t offset, uint64_t length);

 private:
  void AddBlocks(uint64_t offset, uint64_t length);
  void SendRange();
  void SendBlocks();

  BlobReader& blobs_;
  std::shared_ptr<const BlobReader::Held> held_;  // added last; null: none yet
  uint64_t begin_ = 0;
  uint64_t end_ = 0;
  // Blocks of files that are not mapped, and those files.
  std::vector<std::shared_ptr<const BlobReader::Held>> far_;
  std::vector<BlockCache::BlockId> blocks_;
};

}  // namespace ckptfs
