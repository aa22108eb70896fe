// SPDX-License-Identifier: Apache-2.0
//
// HotSteps keeps the files of the newest durable snapshots in memory: their pages are
// read in once and locked in the page cache, so that whoever loads the step next does not
// wait for a disk.  It takes nothing of the arenas, hence never room that a save needs.
//
// Thread safety: all methods may be called concurrently; no lock is held while pages are
// locked.
// Lifetime: files that were removed take their room on the disk until they are dropped here.
// Units: bytes.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/store/store.h"

namespace ckptfs {

class LockedFile;

struct HotStepsStatus {
  uint64_t steps = 0;
  uint64_t bytes = 0;
  std::string why_not;  // why the last one is not
};

class HotSteps {
 public:
  // At most `steps` steps, the newest that fit into `budget` together; 0: none.
  HotSteps(uint64_t steps, uint64_t budget);
  ~HotSteps();

  // The step has just become durable; `paths` are its files.  Older ones make room for it.
  // kExhausted if it does not fit at all, or may not be locked (RLIMIT_MEMLOCK).
  // BLOCKS: on reading what is in memory no more.
  Status Add(const StepRecord& record, const std::vector<std::string>& paths);
  void Remove(const StepRecord& record);
  HotStepsStatus status() const;

 private:
  struct Kept;
  using KeptPtr = std::shared_ptr<const Kept>;
  // The steps that have to go for `bytes` more; the caller releases them outside of the lock.
  std::vector<KeptPtr> MakeRoom(uint64_t bytes);
  Result<KeptPtr> Lock(const StepRecord& record, const std::vector<std::string>& paths);

  const uint64_t steps_;
  const uint64_t budget_;
  mutable Mutex mutex_;
  std::deque<KeptPtr> kept_ GUARDED_BY(mutex_);  // oldest first
  std::string why_not_ GUARDED_BY(mutex_);       // of the last that is not
};

}  // namespace ckptfs
