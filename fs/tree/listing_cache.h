// SPDX-License-Identifier: Apache-2.0
//
// ListingCache keeps the children of directories that never change, so that a
// walk over a thousand ranks asks a format once per directory.  What anybody may
// list anybody may make us keep, so its memory is bounded, and a large listing
// is let go as soon as it has been read to its end.
//
// Thread safety: internally synchronised.
// Units: bytes of memory, as good as they can be told.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/base/mutex.h"
#include "fs/tree/node.h"

namespace ckptfs {

struct Listing {
  std::shared_ptr<const StepEntry> step;  // whose names these are
  std::vector<NodePtr> children;          // sorted by name

  // Null if there is no such child.
  NodePtr Find(std::string_view name) const;
  uint64_t Bytes() const;
};

class ListingCache {
 public:
  // Listings of more than a `kSmallParts`-th of it are large.
  static constexpr uint64_t kSmallParts = 32;
  explicit ListingCache(uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Null unless the directory's listing is known and is of this very entry: a
  // step adopted again has the same inodes but is another place.
  std::shared_ptr<const Listing> Find(const Node& directory);
  void Insert(const Node& directory, std::shared_ptr<const Listing> listing);
  // Somebody has read the directory to its end.  True if it was large and went.
  bool Finished(const Node& directory);
  void DropStep(const StepEntry* step);
  uint64_t bytes() const;

 private:
  struct Kept {
    uint64_t inode = 0;
    uint64_t bytes = 0;
    std::shared_ptr<const Listing> listing;
  };
  using Order = std::list<Kept>;
  void Remove(Order::iterator place, Order& removed) EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t max_bytes_;
  mutable Mutex mutex_;
  Order order_ GUARDED_BY(mutex_);  // used last first
  std::unordered_map<uint64_t, Order::iterator> places_ GUARDED_BY(mutex_);
  uint64_t bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
