// SPDX-License-Identifier: Apache-2.0
//
// SnapshotKeeper makes what a daemon receives steps of its store: first in memory, where
// a mount shows them, then durable.  A store that fails is tried again: until it
// takes the step, this stays in memory or in a spool, and those after it wait.
//
// Thread safety: Keep by one thread at a time, the others by any.  One thread of its own, once
// ShowSoon was called.
// Lifetime: store, catalogue, spooler and what `refresh` uses must outlive it.

#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <thread>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "core/model/family.h"
#include "core/store/step_catalogue.h"
#include "snapshot/landing/received_step.h"
#include "snapshot/landing/spooler.h"
#include "snapshot/receive/rank_session.h"

namespace ckptfs {

class SnapshotKeeper {
 public:
  // `refresh`: a step came, moved into the store, or went; if that fails, others see it later.
  using Refresh = std::function<Status(const StepRecord&)>;
  struct Retries {
    std::chrono::milliseconds pause{1'000};
    std::chrono::milliseconds limit{600'000};
  };
  // `spooler`: has the saves of steps that come with one; may be null.  `retries`: of a store
  // that fails.
  SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh, Spooler* spooler,
                 Retries retries);
  SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh,
                 Spooler* spooler = nullptr)
      : SnapshotKeeper(store, catalogue, std::move(refresh), spooler, Retries()) {}
  ~SnapshotKeeper();

  // Shows a step that will be kept, though others are before it.  REQUIRES: it has a save.
  void ShowSoon(ReceivedStep received);
  // The step as it is durable; one that an earlier daemon has stored is not stored twice.
  // kInvalid if it is not one; the store's error when that has failed
  // for `retries.limit`, which does not count while a spool has it, or Stop was called meanwhile.
  // A save that then stays in its spool says so.
  // BLOCKS: on the store.
  Result<StepRecord> Keep(ReceivedStep received);
  // The step that an earlier daemon has stored with this part.  BLOCKS: on the store.
  using Found = std::optional<StepRecord>;
  Result<Found> FindStored(const PartAgain& part);
  // A step that waits for its store is not waited for any more.
  void Stop();

 private:
  struct Entered {
    StepRecord record;
    bool stored = false;  // by an earlier daemon
  };
  using Save = std::shared_ptr<SaveBytes>;

  void Show(const StepRecord& record);
  void ShowAll();
  Result<Found> FindWhole(const ReceivedStep& received);
  // In memory, and shown.
  Result<Entered> Enter(const ReceivedStep& received);
  // The step that ShowAll made of it, if it has.
  std::optional<Entered> Shown(const Save& save);
  // Again and again while the store fails.  `final`: what does not pass.
  Result<Entered> Insist(const std::string& name, const Save& save,
                         const std::function<bool(ErrorCode)>& final,
                         const std::function<Result<Entered>()>& act);
  bool Pause();  // false when it was stopped

  Store& store_;
  StepCatalogue& catalogue_;
  const Refresh refresh_;
  Spooler* const spooler_;
  const Retries retries_;
  Mutex mutex_;
  CondVar moved_;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::deque<ReceivedStep> to_show_ GUARDED_BY(mutex_);
  Save showing_ GUARDED_BY(mutex_);
  std::map<Save, Entered> shown_ GUARDED_BY(mutex_);  // and not kept yet
  std::thread thread_;
};

// The step in memory that becomes a store's: its files lie where they will be.
// Exposed for tests.
Result<MemoryStep> MemoryStepOf(Store& store, const ReceivedStep& received,
                                const FamilySet& families);

// The model of rank files of which several daemons wrote some (core/commit/world_commit.h).
WorldCommit::ModelOf ModelOfRankFiles();

}  // namespace ckptfs
