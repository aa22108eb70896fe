// SPDX-License-Identifier: Apache-2.0
//
// FailingStorage passes calls to another Storage until the n-th one that
// changes something, at which the "machine" stops: that call has its effect or
// not, and every later call fails.
//
// Thread safety: as the other's; the counter is atomic.

#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/blob/storage.h"

namespace ckptfs::testing_support {

class FailingStorage final : public Storage {
 public:
  // `stop_at` counts changing calls from 0; `with_effect`: the last one happens.
  FailingStorage(std::shared_ptr<Storage> storage, int stop_at, bool with_effect)
      : storage_(std::move(storage)), left_(stop_at), with_effect_(with_effect) {}

  bool stopped() const { return stopped_; }

  Result<std::unique_ptr<StorageWriter>> Create(std::string_view name) override {
    if (!Alive()) return Fail(Stopped());
    return storage_->Create(name);
  }
  Result<size_t> ReadAt(std::string_view name, uint64_t offset, std::span<std::byte> out) override {
    if (stopped_) return Fail(Stopped());
    return storage_->ReadAt(name, offset, out);
  }
  Result<StorageStat> Stat(std::string_view name) override {
    if (stopped_) return Fail(Stopped());
    return storage_->Stat(name);
  }
  Status PublishIfAbsent(std::string_view name, std::span<const std::byte> bytes) override {
    if (Alive()) return storage_->PublishIfAbsent(name, bytes);
    if (std::exchange(may_act_, false)) (void)!storage_->PublishIfAbsent(name, bytes);
    return Fail(Stopped());
  }
  Result<std::vector<std::string>> List(std::string_view prefix) override {
    if (stopped_) return Fail(Stopped());
    return storage_->List(prefix);
  }
  Status Remove(std::string_view name) override {
    if (!Alive()) return Fail(Stopped());
    return storage_->Remove(name);
  }

 private:
  static Error Stopped() { return Error{ErrorCode::kIo, "the machine stopped"}; }
  bool Alive() {
    if (stopped_) return false;
    if (left_-- > 0) return true;
    stopped_ = true;
    may_act_ = with_effect_;
    return false;
  }

  std::shared_ptr<Storage> storage_;
  std::atomic<int> left_;
  bool with_effect_;
  bool may_act_ = false;
  std::atomic<bool> stopped_{false};
};

}  // namespace ckptfs::testing_support
