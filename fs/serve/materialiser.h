// SPDX-License-Identifier: Apache-2.0
//
// Materialiser fills view files into huge-page files, each once for all who
// open it meanwhile, and keeps the filled ones within the pool's budget; the
// least recently used one that nobody has open or mapped makes room.
//
// Thread safety: all methods may be called concurrently; no lock is held while
// filling or waiting.
// Lifetime: backings may outlive the calls, never the materialiser.
// Units: bytes.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "fs/filesystem.h"
#include "fs/serve/backing.h"
#include "fs/serve/page_pool.h"
#include "fs/serve/plan_cache.h"

namespace ckptfs {

class Materialiser {
 public:
  struct Counts {
    uint64_t files = 0;
    uint64_t bytes = 0;  // of the files that are filled
    uint64_t fills = 0;
    uint64_t hits = 0;  // opens that found a filled file
    uint64_t evictions = 0;
    uint64_t filled_bytes = 0;  // ever
  };

  explicit Materialiser(std::unique_ptr<PagePool> pool) : pool_(std::move(pool)) {}
  ~Materialiser();

  // The filled file.  kExhausted if it does not fit beside what is in use: the
  // caller serves it otherwise.  Any other error is the source's.
  // BLOCKS: on filling, its own or that of a concurrent caller.
  Result<std::shared_ptr<const Backing>> Acquire(InodeNumber inode, const PreparedPlan& plan);

  // A file of this size may be wanted soon.
  void Expect(uint64_t size) { pool_->Expect(size); }
  // True if Acquire would not have to fill.
  bool IsFilled(InodeNumber inode) const;
  // Make a removed step's files the first to go.
  void DropStep(const Digest& manifest);

  const PagePool& pool() const { return *pool_; }
  Counts counts() const;

  static constexpr size_t kMaxFiles = 1024;  // each holds a descriptor

 private:
  enum class Phase { kFilling, kReady, kLeaving };
  // One fill that several opens may wait for.
  struct Flight {
    bool done = false;
    Status status;
  };
  struct Entry {
    Phase phase = Phase::kFilling;
    PagePool::File file;
    std::shared_ptr<Flight> flight;
    std::weak_ptr<const Backing> lent;  // the same for all who use it now
    uint64_t users = 0;                 // backings not yet returned
    uint64_t used = 0;                  // clock
    Digest step;
  };
  class Loan;

  std::shared_ptr<const Backing> Lend(uint64_t inode, Entry& entry)
      EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(uint64_t inode);
  void AwaitChange() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The backing if it is filled, else an empty pointer and in `mine` whether
  // the caller has to fill it (`flight` is then his).
  Result<std::shared_ptr<const Backing>> Join(uint64_t inode, const PreparedPlan& plan,
                                              std::shared_ptr<Flight>* flight, bool* mine);
  Result<std::shared_ptr<const Backing>> Wait(uint64_t inode, Flight& flight);
  Result<PagePool::File> FillNew(const PreparedPlan& plan);
  Result<PagePool::File> TakeRoom(uint64_t size);
  // Frees the pages of the least recently used entry that nobody has.
  bool EvictOne();
  bool TryEvict(uint64_t inode);
  std::vector<uint64_t> Evictable() const;
  bool Full() const;

  const std::unique_ptr<PagePool> pool_;
  mutable Mutex mutex_;
  std::condition_variable changed_;  // an entry became ready or went
  std::map<uint64_t, Entry> entries_ GUARDED_BY(mutex_);
  uint64_t clock_ GUARDED_BY(mutex_) = 0;
  Counts counts_ GUARDED_BY(mutex_);
};

// Writes a plan's bytes to `file`, spread over the processors.
Status FillFile(const PreparedPlan& plan, const PagePool::File& file);

}  // namespace ckptfs
