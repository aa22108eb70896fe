// SPDX-License-Identifier: Apache-2.0
//
// Spooler decides which saves go to the spool, and takes them there.  The spool
// is for saves that the store does not take at once.  A whole save is spooled if
// others still wait for the store.  A save that finds the store free goes there
// straight from memory; it is spooled if that fails, or is not over after
// `patience`.  A save stays in memory if the spool has no room for it, or fails.
//
// Thread safety: all methods may be called concurrently.  One worker of its own, which alone
// writes to the spool.
// Lifetime: the destructor waits for what is being written.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/worker.h"
#include "core/commit/spool.h"
#include "snapshot/landing/retry_rule.h"
#include "snapshot/landing/save_bytes.h"

namespace ckptfs {

struct SpoolerOptions {
  uint64_t budget = 0;
  std::chrono::milliseconds patience{5'000};  // with a store that has begun with a save
  RetryRule retry = {};                       // of a spool that fails
  std::function<void(std::string_view line)> log;
};

struct SpoolerStatus {
  std::string directory;
  uint64_t saves = 0;  // that are there
  uint64_t bytes = 0;
  uint64_t budget = 0;
  uint64_t spooled = 0;
  uint64_t full = 0;  // saves that met a full spool
  uint64_t failed = 0;
  std::string last_failure;
};

class Spooler {
 public:
  using SavePtr = std::shared_ptr<SaveBytes>;
  Spooler(OpenedSpool opened, SpoolerOptions options);

  // Returns the saves that an earlier daemon left, oldest first.
  std::vector<SavePtr> left() const;
  // Adds a save that is whole here and waits for its store from now on.
  void Add(SavePtr save);
  // True if a save waits for its store, or is being stored.
  bool waits() const;
  // Notes that the store begins with it.
  void Begin(const SaveBytes& save);
  // Notes that the store could not take it.
  void Fails(const SaveBytes& save);
  // Notes that the store has its bytes, but it is not decided if it becomes a step.
  void Stored(const SaveBytes& save);
  // Notes that it is durable, or dropped: the spool forgets it.  BLOCKS: on the disk.
  void Over(const SaveBytes& save);
  // Ends: all goes to the spool, and nothing goes from there to the store any more.
  void End();
  // True if the spool has the save, or could take it: then it stays there for the next daemon.
  // BLOCKS: until that is tried.
  bool Leave(SaveBytes& save);
  std::string directory() const { return spool_->files()->name(); }

  SpoolerStatus status() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Entry {
    SavePtr save;
    uint64_t bytes = 0;
    Clock::time_point due;  // to be spooled
    Tries tries = {};
    bool waits = true;  // for the store
    bool writing = false;
    bool over = false;   // while it was written
    bool full = false;   // it met a full spool
    bool tried = false;  // since Leave
  };
  using Entries = std::list<Entry>;

  Worker::Time Turn();
  // Returns the first save that is due and has room; else when to look again.
  Entries::iterator Next(Clock::time_point& again) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Status Write(SaveBytes& save);
  void Wrote(Entries::iterator entry, const Status& done);
  Entries::iterator Find(const SaveBytes& save) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AnyWaits() const EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const SaveBytes& save, uint64_t bytes);

  const SpoolerOptions options_;
  const std::unique_ptr<Spool> spool_;
  mutable Mutex mutex_;
  CondVar moved_;
  Entries entries_ GUARDED_BY(mutex_);  // by arrival
  uint64_t used_ GUARDED_BY(mutex_) = 0;
  uint64_t spooled_ GUARDED_BY(mutex_) = 0;
  uint64_t full_ GUARDED_BY(mutex_) = 0;
  uint64_t failed_ GUARDED_BY(mutex_) = 0;
  std::string last_failure_ GUARDED_BY(mutex_);
  bool ending_ GUARDED_BY(mutex_) = false;
  Worker worker_;  // last: it uses all others
};

}  // namespace ckptfs
