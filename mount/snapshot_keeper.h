// SPDX-License-Identifier: Apache-2.0
//
// SnapshotKeeper makes what a daemon receives steps of its store: first in memory, where
// a mount shows them, then durable.  A store that fails is tried again: until it
// takes the step, this stays in memory, and those after it wait.
//
// Thread safety: Keep by one thread at a time, Stop by any.
// Lifetime: store, catalogue and what `refresh` uses must outlive it.

#pragma once

#include <chrono>
#include <functional>
#include <optional>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "core/model/family.h"
#include "core/store/step_catalogue.h"
#include "snapshot/rank_session.h"
#include "snapshot/received_step.h"

namespace ckptfs {

class SnapshotKeeper {
 public:
  // `refresh`: a step came, moved into the store, or went; if that fails, others see it later.
  using Refresh = std::function<Status(const StepRecord&)>;
  SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh);

  // The step as it is durable; one that an earlier daemon has stored is not stored twice.
  // kInvalid if it is not one; the store's error when that has failed
  // for ten minutes, or Stop was called meanwhile.
  // BLOCKS: on the store.
  Result<StepRecord> Keep(ReceivedStep received);
  // The step that an earlier daemon has stored with this part.  BLOCKS: on the store.
  using Found = std::optional<StepRecord>;
  Result<Found> FindStored(const PartAgain& part);
  // A step that waits for its store is not waited for any more.
  void Stop();

 private:
  void Show(const StepRecord& record);
  Result<Found> FindWhole(const ReceivedStep& received);
  // Again and again while the store fails.
  Result<Found> Insist(const std::string& name, const std::function<Result<Found>()>& act);
  bool Pause();  // false when it was stopped

  Store& store_;
  StepCatalogue& catalogue_;
  const Refresh refresh_;
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

// The step in memory that becomes a store's: its files lie where they will be.
// Exposed for tests.
Result<MemoryStep> MemoryStepOf(Store& store, const ReceivedStep& received,
                                const FamilySet& families);

// The model of rank files of which several daemons wrote some (core/commit/world_commit.h).
WorldCommit::ModelOf ModelOfRankFiles();

}  // namespace ckptfs
