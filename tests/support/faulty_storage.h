// SPDX-License-Identifier: Apache-2.0
//
// FaultyStorage is another Storage (memory, unless told otherwise) that can fail
// or throw at the n-th call, fail until it is mended, be late, forget what was not made
// durable when the machine "crashes", or stop for good.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: writers and files must not outlive it.

#pragma once

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "core/io/root.h"

namespace ckptfs {

class FaultyStorage final : public Storage {
 public:
  explicit FaultyStorage(std::shared_ptr<Storage> storage = std::make_shared<MemoryRoot>("memory"))
      : Storage(storage->name(), storage->local()), storage_(std::move(storage)) {}

  // The n-th call from now on (1 is the next; those of writers and files count,
  // too) fails.
  void FailAt(uint64_t n, ErrorCode code = ErrorCode::kIo) {
    MutexLock lock(mutex_);
    fail_at_ = fail_to_ = calls_ + n;
    fail_code_ = code;
  }
  // All from the n-th call from now on fail, until it is mended.
  void FailFrom(uint64_t n, ErrorCode code = ErrorCode::kIo) {
    MutexLock lock(mutex_);
    fail_at_ = calls_ + n;
    fail_to_ = UINT64_MAX;
    fail_code_ = code;
  }
  void Mend() {
    MutexLock lock(mutex_);
    fail_at_ = fail_to_ = 0;
  }
  // The n-th call from now on throws, as one that gets no memory does.
  void ThrowAt(uint64_t n) {
    MutexLock lock(mutex_);
    throw_at_ = calls_ + n;
  }
  // Every call takes at least this long.
  void SetDelay(std::chrono::milliseconds delay) {
    MutexLock lock(mutex_);
    delay_ = delay;
  }
  // The machine stops at the n-th call from now on that changes something (1 is
  // the next): that one has its effect or not, every call after it fails.
  void StopAt(uint64_t n, bool with_effect) {
    MutexLock lock(mutex_);
    stop_at_ = changes_ + n;
    with_effect_ = with_effect;
  }
  bool stopped() const {
    MutexLock lock(mutex_);
    return stopped_;
  }
  uint64_t calls() const {
    MutexLock lock(mutex_);
    return calls_;
  }
  // A power failure: open writers lose what they have, and Close of them fails.
  void Crash() {
    MutexLock lock(mutex_);
    ++epoch_;
  }

  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(Enter(path));
    return storage_->List(path);
  }
  Result<EntryStat> Stat(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(Enter(path));
    return storage_->Stat(path);
  }
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override {
    CKPT_RETURN_IF_ERROR(Enter(path));
    CKPT_ASSIGN_OR_RETURN(auto file, storage_->Open(path));
    return std::make_shared<const FaultyFile>(*this, std::move(file));
  }
  Result<std::unique_ptr<StorageWriter>> Create(std::string_view path) override {
    CKPT_RETURN_IF_ERROR(Enter(path));
    CKPT_ASSIGN_OR_RETURN(auto writer, storage_->Create(path));
    return std::make_unique<Writer>(*this, std::move(writer), epoch());
  }
  Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) override {
    return Change(path, [&] { return storage_->PublishIfAbsent(path, bytes); });
  }
  Status Remove(std::string_view path) override {
    return Change(path, [&] { return storage_->Remove(path); });
  }

 private:
  class FaultyFile final : public File {
   public:
    FaultyFile(const FaultyStorage& storage, std::shared_ptr<const File> file)
        : File(file->name(), file->size()), storage_(storage), file_(std::move(file)) {}
    Result<FileIdentity> Identity() const override {
      CKPT_RETURN_IF_ERROR(storage_.Enter(name()));
      return file_->Identity();
    }
    Status ReadAt(std::span<const ReadRequest> requests) const override {
      CKPT_RETURN_IF_ERROR(storage_.Enter(name()));
      return file_->ReadAt(requests);
    }
    Result<std::shared_ptr<const Mapping>> Map() const override { return file_->Map(); }
    int descriptor() const override { return file_->descriptor(); }

   private:
    const FaultyStorage& storage_;
    const std::shared_ptr<const File> file_;
  };

  class Writer final : public StorageWriter {
   public:
    Writer(FaultyStorage& storage, std::unique_ptr<StorageWriter> writer, uint64_t epoch)
        : storage_(storage), writer_(std::move(writer)), epoch_(epoch) {}
    Status Reserve(uint64_t bytes) override {
      CKPT_RETURN_IF_ERROR(storage_.Enter("room"));
      return writer_->Reserve(bytes);
    }
    Status WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
      CKPT_RETURN_IF_ERROR(storage_.Enter("a part"));
      return writer_->WriteAt(offset, bytes);
    }
    Status Close() override {
      return storage_.Change("close", [this]() -> Status {
        if (epoch_ == storage_.epoch()) return writer_->Close();
        return Fail(ErrorCode::kIo, "lost in a crash");
      });
    }

   private:
    FaultyStorage& storage_;
    const std::unique_ptr<StorageWriter> writer_;
    const uint64_t epoch_;
  };

  uint64_t epoch() const {
    MutexLock lock(mutex_);
    return epoch_;
  }

  // Counts the call, waits, fails if it is its turn.
  Status Enter(std::string_view what) const {
    std::chrono::milliseconds delay;
    bool fails, throws, stopped;
    ErrorCode code;
    {
      MutexLock lock(mutex_);
      fails = ++calls_ >= fail_at_ && calls_ <= fail_to_;
      throws = calls_ == throw_at_;
      code = fail_code_;
      delay = delay_;
      stopped = stopped_;
    }
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    if (throws) throw std::bad_alloc();
    if (stopped) return Fail(ErrorCode::kIo, "the machine stopped");
    if (fails) return Fail(code, StrCat(what, ": injected failure"));
    return {};
  }

  template <class Act>
  Status Change(std::string_view what, Act&& act) {
    CKPT_RETURN_IF_ERROR(Enter(what));
    bool acts = true;
    {
      MutexLock lock(mutex_);
      if (++changes_ == stop_at_) {
        stopped_ = true;
        acts = with_effect_;
      }
    }
    const Status done = acts ? act() : Status();
    if (stopped()) return Fail(ErrorCode::kIo, "the machine stopped");
    return done;
  }

  const std::shared_ptr<Storage> storage_;
  mutable Mutex mutex_;
  mutable uint64_t calls_ GUARDED_BY(mutex_) = 0;
  uint64_t fail_at_ GUARDED_BY(mutex_) = 0;
  uint64_t fail_to_ GUARDED_BY(mutex_) = 0;  // the last that does
  uint64_t throw_at_ GUARDED_BY(mutex_) = 0;
  ErrorCode fail_code_ GUARDED_BY(mutex_) = ErrorCode::kIo;
  std::chrono::milliseconds delay_ GUARDED_BY(mutex_){0};
  uint64_t changes_ GUARDED_BY(mutex_) = 0;
  uint64_t stop_at_ GUARDED_BY(mutex_) = 0;
  bool with_effect_ GUARDED_BY(mutex_) = false;
  bool stopped_ GUARDED_BY(mutex_) = false;
  uint64_t epoch_ GUARDED_BY(mutex_) = 0;
};

}  // namespace ckptfs
