// SPDX-License-Identifier: Apache-2.0
//
// CountingStorage passes calls to another Storage and counts them, the names that
// listings return included.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <compare>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/io/root.h"

namespace ckptfs::testing_support {

struct StorageCalls {
  uint64_t lists = 0;
  uint64_t listed = 0;  // names
  uint64_t reads = 0;
  uint64_t stats = 0;
  uint64_t writes = 0;  // published, created or removed
  auto operator<=>(const StorageCalls&) const = default;

  friend std::ostream& operator<<(std::ostream& out, const StorageCalls& calls) {
    return out << calls.lists << " lists of " << calls.listed << " names, " << calls.reads
               << " reads, " << calls.stats << " stats, " << calls.writes << " writes";
  }
};

class CountingStorage : public Storage {
 public:
  explicit CountingStorage(std::shared_ptr<Storage> storage)
      : Storage(storage->name(), storage->local()), storage_(std::move(storage)) {}

  // Since the last time it was asked.
  StorageCalls Take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(calls_, {});
  }

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    auto entries = storage_->List(path);
    Count(&StorageCalls::lists);
    Count(&StorageCalls::listed, entries ? entries->size() : 0);
    return entries;
  }
  Result<EntryStat> Stat(std::string_view path) const override {
    Count(&StorageCalls::stats);
    return storage_->Stat(path);
  }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    Count(&StorageCalls::reads);
    return storage_->Open(path);
  }
  Result<std::unique_ptr<StorageWriter>> Create(std::string_view path) override {
    Count(&StorageCalls::writes);
    return storage_->Create(path);
  }
  Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) override {
    Count(&StorageCalls::writes);
    return storage_->PublishIfAbsent(path, bytes);
  }
  Status Remove(std::string_view path) override {
    Count(&StorageCalls::writes);
    return storage_->Remove(path);
  }

 private:
  void Count(uint64_t StorageCalls::*what, uint64_t times = 1) const {
    const std::lock_guard lock(mutex_);
    calls_.*what += times;
  }

  const std::shared_ptr<Storage> storage_;
  mutable std::mutex mutex_;
  mutable StorageCalls calls_;
};

}  // namespace ckptfs::testing_support
