// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/handle_table.h"

#include <utility>

namespace ckptfs {

FileHandle HandleTable::Add(OpenHandle handle) {
  const FileHandle number{next_.fetch_add(1, std::memory_order_relaxed)};
  auto shared = std::make_shared<const OpenHandle>(std::move(handle));
  Shard& shard = ShardOf(number);
  MutexLock lock(shard.mutex);
  shard.open.emplace(static_cast<uint64_t>(number), std::move(shared));
  size_.fetch_add(1, std::memory_order_relaxed);
  return number;
}

std::shared_ptr<const OpenHandle> HandleTable::Find(FileHandle handle) const {
  const Shard& shard = ShardOf(handle);
  MutexLock lock(shard.mutex);
  const auto found = shard.open.find(static_cast<uint64_t>(handle));
  return found == shard.open.end() ? nullptr : found->second;
}

std::shared_ptr<const OpenHandle> HandleTable::Remove(FileHandle handle) {
  Shard& shard = ShardOf(handle);
  MutexLock lock(shard.mutex);
  const auto found = shard.open.find(static_cast<uint64_t>(handle));
  if (found == shard.open.end()) return nullptr;
  auto removed = std::move(found->second);
  shard.open.erase(found);
  size_.fetch_sub(1, std::memory_order_relaxed);
  return removed;
}

std::vector<std::pair<FileHandle, std::shared_ptr<const OpenHandle>>> HandleTable::All() const {
  std::vector<std::pair<FileHandle, std::shared_ptr<const OpenHandle>>> all;
  for (const Shard& shard : shards_) {
    MutexLock lock(shard.mutex);
    for (const auto& [handle, open] : shard.open) all.emplace_back(FileHandle{handle}, open);
  }
  return all;
}

void HandleTable::Restore(FileHandle handle, OpenHandle open) {
  auto shared = std::make_shared<const OpenHandle>(std::move(open));
  Shard& shard = ShardOf(handle);
  MutexLock lock(shard.mutex);
  if (!shard.open.emplace(static_cast<uint64_t>(handle), std::move(shared)).second) return;
  size_.fetch_add(1, std::memory_order_relaxed);
}

void HandleTable::Replace(FileHandle handle, OpenHandle with) {
  auto shared = std::make_shared<const OpenHandle>(std::move(with));
  Shard& shard = ShardOf(handle);
  MutexLock lock(shard.mutex);
  const auto found = shard.open.find(static_cast<uint64_t>(handle));
  if (found != shard.open.end()) std::swap(found->second, shared);
}

}  // namespace ckptfs
