// SPDX-License-Identifier: Apache-2.0
//
// StepCatalogue is all steps there are to show: those that a store has published
// and those that are only in memory so far (a snapshot that is being written, say).
//
// A step in memory is an ordinary model whose blobs are owned (their size and the
// digests of their chunks tell what they are) and lie in the store's blob
// directory, where they will be; until then their bytes come from a Root.  So its
// manifest is rendered once, when it is held, and is the one that is published:
// same digest, hence same inodes, before and after.
//
// Thread safety: all methods may be called concurrently; no lock is held across
// I/O.
// Lifetime: the store must outlive it; loaded steps outlive both.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/store/step_changes.h"
#include "core/store/store.h"

namespace ckptfs {

struct MemoryStep {
  std::string run;
  std::string source;  // as of StepRecord
  std::string root;
  StepModel model;                    // every blob owned, every root Store::blobs()
  std::shared_ptr<const Root> bytes;  // the bytes that this directory will hold of it
  size_t stored = 0;                  // blobs at the end that the store has already
};

class StepCatalogue {
 public:
  explicit StepCatalogue(Store& store) : store_(store) {}

  // Shows a step that is not stored yet, under its id or the next attempt's.  A step
  // that the store has already is not held: its record is the answer.  One that could
  // not be stored under its name is refused: kInvalid, kExists for another's run.
  Result<StepRecord> Hold(MemoryStep step);
  // Stores a step that is held; from then on its bytes are read from the store,
  // except through opens that exist.  Its name changes only if another process took that
  // meanwhile.  kDataLoss if the bytes are not those of the manifest.
  // BLOCKS: on writing them.
  Result<StepRecord> Persist(const StepRecord& record);
  // Shows a held step no more.  kNotFound if it is not held.
  Status Release(const StepRecord& record);

  // Shows a step that several daemons hold in memory, in place of another one of that name
  // (StepPlace::kMemory).  It is a step of this catalogue alone, and is never stored.
  Result<StepRecord> ShowMemory(MemoryStep step);
  // Shows it no more.
  void HideMemory(const StepRecord& record);

  // Loads a step of any kind, as Store::Load does.
  Result<std::shared_ptr<const Step>> Load(const StepRecord& record);

  // The records of those that are only in memory, by name.
  std::vector<StepRecord> held() const;

  // As Store::Hold; null of a step that is only in memory.
  std::shared_ptr<const void> Pin(const StepRecord& record);

  // Notice what other processes published since.
  Status Refresh() { return store_.Refresh(); }
  Status RefreshStep(std::string_view run, std::string_view id) {
    return store_.RefreshStep(run, id);
  }
  // As Store::News, of both kinds.  A step that moved from memory into the store
  // is news with the record it had.
  Result<StepNews> News(uint64_t generation);

 private:
  using Name = std::pair<std::string, std::string>;  // run, id
  struct Held {
    StepRecord record;
    RenderedStep rendered;
    std::shared_ptr<Step> step;  // nobody changes it once it is held
    size_t stored = 0;
  };
  using HeldPtr = std::shared_ptr<const Held>;

  Status CheckRun(const std::string& run, const std::string& root);
  // The step as it will be loaded; its record has the model's id.
  Result<std::shared_ptr<Held>> Render(MemoryStep& step) const;
  // The store's news into ours.
  Status Pull();
  HeldPtr Find(const StepRecord& record) const;  // null if it is not held
  Result<HeldPtr> FindHeld(const StepRecord& record) const;
  // It is not held any more: what the store has under its name is shown, if
  // anything.
  void Forget(const HeldPtr& held);

  Store& store_;
  mutable Mutex mutex_;
  std::map<Name, HeldPtr> held_ GUARDED_BY(mutex_);
  std::map<Name, HeldPtr> memory_ GUARDED_BY(mutex_);  // of several daemons
  StepChanges changes_ GUARDED_BY(mutex_);
  uint64_t seen_ GUARDED_BY(mutex_) = 0;  // of the store's news
};

}  // namespace ckptfs
