// SPDX-License-Identifier: Apache-2.0
//
// OpenHandle is an open file; HandleTable gives out handles to them.
//
// Thread safety: HandleTable is internally synchronised; an OpenHandle is
// immutable but for Degrade.
// Lifetime: an OpenHandle keeps all that its reads need: plan, loaded step,
// backing.  A read that runs while its handle is released finishes.

#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "fs/serve/backing.h"
#include "fs/serve/prepared_plan.h"
#include "fs/types.h"

namespace ckptfs {

struct OpenHandle {
  InodeNumber inode{};
  // The content: of a plan, or a text; neither: an earlier process knew it, and only `backing`
  // is left.
  std::shared_ptr<const PreparedPlan> plan;
  std::shared_ptr<const std::string> text;
  std::shared_ptr<const Backing> backing;  // null: streamed
  Reading reading = Reading::kRandom;
  // Bytes that were streamed, by this handle and those that took its place.
  std::shared_ptr<std::atomic<uint64_t>> streamed = std::make_shared<std::atomic<uint64_t>>(0);
};

class HandleTable {
 public:
  FileHandle Add(OpenHandle handle);
  // Null if there is no such handle.
  std::shared_ptr<const OpenHandle> Find(FileHandle handle) const;
  // The handle that was, or null.
  std::shared_ptr<const OpenHandle> Remove(FileHandle handle);
  // All of them, in no order, and the next handle's number.
  std::vector<std::pair<FileHandle, std::shared_ptr<const OpenHandle>>> All() const;
  uint64_t next() const { return next_.load(); }
  // Opens a handle of an earlier process again.  REQUIRES: StartAt above it, before any Add.
  void Restore(FileHandle handle, OpenHandle open);
  void StartAt(uint64_t next) { next_ = next; }
  // Replace what a handle is.
  void Replace(FileHandle handle, OpenHandle with);
  size_t size() const { return size_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kShards = 64;
  struct alignas(64) Shard {
    mutable Mutex mutex;
    std::unordered_map<uint64_t, std::shared_ptr<const OpenHandle>> open GUARDED_BY(mutex);
  };
  Shard& ShardOf(FileHandle handle) { return shards_[static_cast<uint64_t>(handle) % kShards]; }
  const Shard& ShardOf(FileHandle handle) const {
    return shards_[static_cast<uint64_t>(handle) % kShards];
  }

  std::array<Shard, kShards> shards_;
  std::atomic<uint64_t> next_{1};
  std::atomic<size_t> size_{0};
};

}  // namespace ckptfs
