// SPDX-License-Identifier: Apache-2.0
//
// CountingStorage passes calls to another Storage and counts them, the names that
// listings return included.
//
// Thread safety: none; for one thread.

#pragma once

#include <compare>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/blob/storage.h"

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

class CountingStorage final : public Storage {
 public:
  explicit CountingStorage(std::shared_ptr<Storage> storage) : storage_(std::move(storage)) {}

  // Since the last time it was asked.
  StorageCalls Take() { return std::exchange(calls_, {}); }

  Result<std::unique_ptr<StorageWriter>> Create(std::string_view name) override {
    ++calls_.writes;
    return storage_->Create(name);
  }
  Result<size_t> ReadAt(std::string_view name, uint64_t offset, std::span<std::byte> out) override {
    ++calls_.reads;
    return storage_->ReadAt(name, offset, out);
  }
  Result<StorageStat> Stat(std::string_view name) override {
    ++calls_.stats;
    return storage_->Stat(name);
  }
  Status PublishIfAbsent(std::string_view name, std::span<const std::byte> bytes) override {
    ++calls_.writes;
    return storage_->PublishIfAbsent(name, bytes);
  }
  Result<std::vector<std::string>> List(std::string_view prefix) override {
    ++calls_.lists;
    auto names = storage_->List(prefix);
    if (names) calls_.listed += names->size();
    return names;
  }
  Status Remove(std::string_view name) override {
    ++calls_.writes;
    return storage_->Remove(name);
  }

 private:
  std::shared_ptr<Storage> storage_;
  StorageCalls calls_;
};

}  // namespace ckptfs::testing_support
