// SPDX-License-Identifier: Apache-2.0
//
// LiveOpens knows how each inode that is open now is served.  The kernel
// refuses (EIO) a passthrough open while the inode is open through the page
// cache and the reverse, and two passthrough opens with different backings; so
// an open joins what is live.
//
//   none --open cached--> cached(n) --last release--> none
//   none --open backed--> passthrough(n, backing) --last release--> none
//
// Thread safety: all methods may be called concurrently.
// Lifetime: holds the backing while the inode is open.

#pragma once

#include <array>
#include <memory>
#include <optional>
#include <unordered_map>

#include "core/base/mutex.h"
#include "fs/serve/backing.h"
#include "fs/types.h"

namespace ckptfs {

class LiveOpens {
 public:
  using BackingPtr = std::shared_ptr<const Backing>;

  // Nothing: the inode is not open.  A null pointer: open through the cache.
  std::optional<BackingPtr> Peek(InodeNumber inode) const;

  // One more open, with `wanted` (null: the page cache) if it is the first.
  // Returns what it has to be served by.
  BackingPtr Join(InodeNumber inode, BackingPtr wanted);
  void Leave(InodeNumber inode);

  // The only open of the inode goes through the page cache from now on; false
  // if it is not the only one.
  bool Degrade(InodeNumber inode);

 private:
  static constexpr size_t kShards = 16;
  struct Live {
    BackingPtr backing;
    uint64_t opens = 0;
  };
  struct alignas(64) Shard {
    mutable Mutex mutex;
    std::unordered_map<uint64_t, Live> live GUARDED_BY(mutex);
  };
  Shard& ShardOf(InodeNumber inode) { return shards_[static_cast<uint64_t>(inode) % kShards]; }

  std::array<Shard, kShards> shards_;
};

}  // namespace ckptfs
