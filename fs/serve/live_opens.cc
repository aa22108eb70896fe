// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/live_opens.h"

#include <utility>

namespace ckptfs {

std::optional<LiveOpens::BackingPtr> LiveOpens::Peek(InodeNumber inode) const {
  const Shard& shard = shards_[static_cast<uint64_t>(inode) % kShards];
  MutexLock lock(shard.mutex);
  const auto found = shard.live.find(static_cast<uint64_t>(inode));
  if (found == shard.live.end()) return std::nullopt;
  return found->second.backing;
}

LiveOpens::BackingPtr LiveOpens::Join(InodeNumber inode, BackingPtr wanted) {
  Shard& shard = ShardOf(inode);
  MutexLock lock(shard.mutex);
  Live& live = shard.live[static_cast<uint64_t>(inode)];
  if (live.opens++ == 0) live.backing = std::move(wanted);
  return live.backing;
}

void LiveOpens::Leave(InodeNumber inode) {
  BackingPtr last;  // let go after the lock
  Shard& shard = ShardOf(inode);
  MutexLock lock(shard.mutex);
  const auto found = shard.live.find(static_cast<uint64_t>(inode));
  if (found == shard.live.end() || --found->second.opens > 0) return;
  last = std::move(found->second.backing);
  shard.live.erase(found);
}

bool LiveOpens::Degrade(InodeNumber inode) {
  BackingPtr dropped;
  Shard& shard = ShardOf(inode);
  MutexLock lock(shard.mutex);
  const auto found = shard.live.find(static_cast<uint64_t>(inode));
  if (found == shard.live.end() || found->second.opens != 1) return false;
  dropped = std::exchange(found->second.backing, nullptr);
  return true;
}

}  // namespace ckptfs
