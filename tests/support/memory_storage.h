// SPDX-License-Identifier: Apache-2.0
//
// MemoryStorage is the fake of the Storage seam: it can fail at the n-th call,
// be late, and forget what was not made durable when the machine "crashes".
//
// Thread safety: all methods may be called concurrently.
// Lifetime: writers must not outlive it.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/blob/file_storage.h"
#include "core/blob/storage.h"

namespace ckptfs {

class MemoryStorage final : public Storage {
 public:
  // The n-th call from now on (1 is the next; Append and Close count too) fails.
  void FailAt(uint64_t n, ErrorCode code = ErrorCode::kIo) {
    MutexLock lock(mutex_);
    fail_at_ = calls_ + n;
    fail_code_ = code;
  }
  // Every call takes at least this long.
  void SetDelay(std::chrono::milliseconds delay) {
    MutexLock lock(mutex_);
    delay_ = delay;
  }
  uint64_t calls() {
    MutexLock lock(mutex_);
    return calls_;
  }
  // A power failure: open writers lose what they have, and Close of them fails.
  void Crash() {
    MutexLock lock(mutex_);
    ++epoch_;
  }

  Result<std::unique_ptr<StorageWriter>> Create(std::string_view name) override {
    CKPT_RETURN_IF_ERROR(Enter(name));
    MutexLock lock(mutex_);
    return std::unique_ptr<StorageWriter>(new Writer(*this, std::string(name), epoch_));
  }

  Result<size_t> ReadAt(std::string_view name, uint64_t offset, std::span<std::byte> out) override {
    CKPT_RETURN_IF_ERROR(Enter(name));
    MutexLock lock(mutex_);
    const auto found = objects_.find(name);
    if (found == objects_.end()) return Missing(name);
    const std::string& bytes = found->second.bytes;
    if (offset >= bytes.size()) return size_t{0};
    const size_t n = std::min<uint64_t>(out.size(), bytes.size() - offset);
    std::memcpy(out.data(), bytes.data() + offset, n);
    return n;
  }

  Result<StorageStat> Stat(std::string_view name) override {
    CKPT_RETURN_IF_ERROR(Enter(name));
    MutexLock lock(mutex_);
    const auto found = objects_.find(name);
    if (found == objects_.end()) return Missing(name);
    return StorageStat{found->second.bytes.size(), found->second.mtime_ns};
  }

  Status PublishIfAbsent(std::string_view name, std::span<const std::byte> bytes) override {
    CKPT_RETURN_IF_ERROR(Enter(name));
    MutexLock lock(mutex_);
    const bool first =
        objects_.try_emplace(std::string(name), Object{Text(bytes), ++clock_}).second;
    if (!first) return Fail(ErrorCode::kExists, StrCat(name, " exists"));
    return {};
  }

  Result<std::vector<std::string>> List(std::string_view prefix) override {
    while (prefix.ends_with('/')) prefix.remove_suffix(1);
    CKPT_RETURN_IF_ERROR(Enter(prefix.empty() ? "all" : prefix));
    const std::string folder = prefix.empty() ? "" : StrCat(prefix, "/");
    std::vector<std::string> names;
    MutexLock lock(mutex_);
    for (const auto& [name, object] : objects_) {
      if (name.starts_with(folder)) names.push_back(name);
    }
    return names;
  }

  Status Remove(std::string_view name) override {
    CKPT_RETURN_IF_ERROR(Enter(name));
    MutexLock lock(mutex_);
    const auto found = objects_.find(name);
    if (found == objects_.end()) return Missing(name);
    objects_.erase(found);
    return {};
  }

 private:
  struct Object {
    std::string bytes;
    int64_t mtime_ns = 0;
  };

  class Writer final : public StorageWriter {
   public:
    Writer(MemoryStorage& storage, std::string name, uint64_t epoch)
        : storage_(storage), name_(std::move(name)), epoch_(epoch) {}
    Status Append(std::span<const std::byte> bytes) override {
      CKPT_RETURN_IF_ERROR(storage_.Enter(name_));
      bytes_ += Text(bytes);
      return {};
    }
    Status Close() override {
      CKPT_RETURN_IF_ERROR(storage_.Enter(name_));
      return storage_.Put(name_, bytes_, epoch_);
    }

   private:
    MemoryStorage& storage_;
    const std::string name_;
    const uint64_t epoch_;
    std::string bytes_;
  };

  static std::string Text(std::span<const std::byte> bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  static tl::unexpected<Error> Missing(std::string_view name) {
    return Fail(ErrorCode::kNotFound, StrCat(name, ": no such object"));
  }

  // Counts the call, waits, fails if it is its turn.
  Status Enter(std::string_view name) {
    CKPT_RETURN_IF_ERROR(CheckStorageName(name));
    std::chrono::milliseconds delay;
    bool fails;
    ErrorCode code;
    {
      MutexLock lock(mutex_);
      fails = ++calls_ == fail_at_;
      code = fail_code_;
      delay = delay_;
    }
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    if (fails) return Fail(code, StrCat(name, ": injected failure"));
    return {};
  }

  Status Put(const std::string& name, const std::string& bytes, uint64_t epoch) {
    MutexLock lock(mutex_);
    if (epoch != epoch_) return Fail(ErrorCode::kIo, StrCat(name, ": lost in a crash"));
    objects_.insert_or_assign(name, Object{bytes, ++clock_});
    return {};
  }

  Mutex mutex_;
  std::map<std::string, Object, std::less<>> objects_ GUARDED_BY(mutex_);
  uint64_t calls_ GUARDED_BY(mutex_) = 0;
  uint64_t fail_at_ GUARDED_BY(mutex_) = 0;
  ErrorCode fail_code_ GUARDED_BY(mutex_) = ErrorCode::kIo;
  std::chrono::milliseconds delay_ GUARDED_BY(mutex_){0};
  uint64_t epoch_ GUARDED_BY(mutex_) = 0;
  int64_t clock_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
