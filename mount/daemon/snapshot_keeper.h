// SPDX-License-Identifier: Apache-2.0
//
// SnapshotKeeper makes the saves of a landing steps of a store: first in memory, where a mount
// shows them, then durable.
//
// Thread safety: as StepMaker's.
// Lifetime: store, catalogue and what the hooks use must outlive it.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "core/model/family.h"
#include "core/store/step_catalogue.h"
#include "snapshot/landing/step_maker.h"

namespace ckptfs {

class SnapshotKeeper final : public StepMaker {
 public:
  // A step came, moved into the store, or went; if that fails, others see it later.
  using Refresh = std::function<Status(const StepRecord&)>;
  // Told of what became of saves.  May be empty.
  using Told = std::function<void(const News&)>;
  SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh, Told told = {})
      : store_(store),
        catalogue_(catalogue),
        refresh_(std::move(refresh)),
        told_(std::move(told)) {}

  // kInvalid if it is not a step.
  Result<Entered> Enter(const std::shared_ptr<SaveBytes>& save) override;
  // kDataLoss if its bytes changed.
  Result<StepRecord> Persist(const StepRecord& record) override;
  void Release(const StepRecord& record) override;
  using Found = std::optional<StepRecord>;
  Result<Found> FindStored(const PartAgain& part) override;
  std::shared_ptr<BlobStream> Stream(const std::string& path, uint64_t bytes,
                                     std::weak_ptr<const void> owner) override;
  void Tell(const News& news) override {
    if (told_) told_(news);
  }

 private:
  void Show(const StepRecord& record);
  Result<Found> FindWhole(const PreparedPart& whole);

  Store& store_;
  StepCatalogue& catalogue_;
  const Refresh refresh_;
  const Told told_;
};

// The step in memory that becomes a store's: its files lie where they will be.
// Exposed for tests.
Result<MemoryStep> MemoryStepOf(Store& store, const std::shared_ptr<SaveBytes>& save,
                                const FamilySet& families);

// The model of rank files of which several daemons wrote some (core/commit/world_commit.h).
WorldCommit::ModelOf ModelOfRankFiles();

}  // namespace ckptfs
