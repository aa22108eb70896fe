// SPDX-License-Identifier: Apache-2.0
//
// Materialiser fills view files into huge-page files, each once for all who
// open it meanwhile, and keeps the filled ones within the pool's budget; the
// least recently used one that nobody has open or mapped makes room.  (No Lru:
// that one drops what was used last whoever has it.)
//
// Thread safety: all methods may be called concurrently; no lock is held while
// filling or waiting.
// Lifetime: backings may outlive the calls, never the materialiser.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/single_flight.h"
#include "fs/serve/backing.h"
#include "fs/serve/page_pool.h"
#include "fs/serve/prepared_plan.h"
#include "fs/types.h"

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

  // Writes a plan's bytes to a file.
  using Fill = std::function<Status(const PreparedPlan& plan, const PagePool::File& file)>;

  explicit Materialiser(std::unique_ptr<PagePool> pool, Fill fill = FillFile)
      : pool_(std::move(pool)), fill_(std::move(fill)) {}
  ~Materialiser();

  // The filled file.  kExhausted if it does not fit beside what is in use: the
  // caller serves it otherwise.  Any other error is the source's.
  // BLOCKS: on filling, its own or that of a concurrent caller.
  Result<std::shared_ptr<const Backing>> Acquire(InodeNumber inode, const PreparedPlan& plan);

  // The file, of this size, may be wanted soon.
  void Expect(InodeNumber inode, uint64_t size) {
    if (!IsFilled(inode)) pool_->Expect(static_cast<uint64_t>(inode), size);
  }
  // True if Acquire would not have to fill.
  bool IsFilled(InodeNumber inode) const;
  // Make a removed step's files the first to go.
  void DropStep(const Digest& manifest);

  const PagePool& pool() const { return *pool_; }
  Counts counts() const;

  // Each holds a descriptor; those that are being filled come on top.
  static constexpr size_t kMaxFiles = 1024;

  // Spread over the processors.
  static Status FillFile(const PreparedPlan& plan, const PagePool::File& file);

 private:
  using BackingPtr = std::shared_ptr<const Backing>;
  struct Entry {
    bool leaving = false;  // somebody tries to evict it
    PagePool::File file;
    std::weak_ptr<const Backing> lent;  // the same for all who use it now
    uint64_t users = 0;                 // backings not yet returned
    uint64_t used = 0;                  // clock
    Digest step;
  };
  class Loan;

  std::shared_ptr<const Backing> Lend(uint64_t inode, Entry& entry)
      EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(uint64_t inode);
  // Null if it is not filled.
  BackingPtr FindFilled(uint64_t inode);
  // Fills it, unless somebody did meanwhile.
  Result<BackingPtr> Make(uint64_t inode, const PreparedPlan& plan);
  Result<PagePool::File> FillNew(const PreparedPlan& plan);
  Status FillOnce(const PreparedPlan& plan, const PagePool::File& file);
  Result<PagePool::File> TakeRoom(uint64_t size);
  // Frees the pages of the least recently used entry that nobody has.
  bool EvictOne();
  bool TryEvict(uint64_t inode);
  std::vector<uint64_t> Evictable() const;
  bool Full() const;

  const std::unique_ptr<PagePool> pool_;
  const Fill fill_;
  SingleFlight<uint64_t, BackingPtr> filling_;  // by inode
  mutable Mutex mutex_;
  CondVar changed_;  // an entry that was leaving stays or went
  std::map<uint64_t, Entry> entries_ GUARDED_BY(mutex_);
  uint64_t clock_ GUARDED_BY(mutex_) = 0;
  Counts counts_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
