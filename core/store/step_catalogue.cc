// SPDX-License-Identifier: Apache-2.0
#include "core/store/step_catalogue.h"

#include <algorithm>
#include <set>

#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/io/root.h"
#include "core/manifest/manifest.h"
#include "core/records/records.h"

namespace ckptfs {
namespace {

// kInvalid unless all of the model's bytes are to be the store's own, directly in
// its blob directory.
Status CheckOwned(const StepModel& model, const std::string& blobs) {
  for (const Blob& blob : model.blobs) {
    if (blob.owned() && !blob.side && model.roots[blob.root] == blobs) continue;
    return Fail(ErrorCode::kInvalid,
                StrCat(model.PathOf(blob), ": not a blob that the store will own"));
  }
  return {};
}

}  // namespace

// kExists if the store would not publish a step of this root in the run.
Status StepCatalogue::CheckRun(const std::string& run, const std::string& root) {
  const auto latest = store_.Resolve(run, "latest");
  if (!latest || latest->root == root) return {};  // all steps of a run are of one root
  return Fail(ErrorCode::kExists, StrCat("run '", run, "' belongs to ", latest->root));
}

Result<std::shared_ptr<StepCatalogue::Held>> StepCatalogue::Render(MemoryStep& step) const {
  CKPT_RETURN_IF_ERROR(CheckName(step.run, "run"));
  CKPT_RETURN_IF_ERROR(CheckStepId(step.model.id));
  CKPT_RETURN_IF_ERROR(CheckOwned(step.model, store_.blobs()));
  auto held = std::make_shared<Held>();
  held->stored = step.stored;
  CKPT_ASSIGN_OR_RETURN(held->rendered, store_.Render(step.model));
  held->step = std::make_shared<Step>();
  // The step as it will be loaded once it is stored, but that it keeps what its lists of chunks
  // will have.
  CKPT_ASSIGN_OR_RETURN(held->step->model, ParseManifest(held->rendered.bytes, store_.blobs()));
  for (size_t i = 0; i < step.model.blobs.size(); ++i) {
    held->step->model.blobs[i].chunks = std::move(step.model.blobs[i].chunks);
  }
  held->record = RecordOf(step.run, step.model, held->rendered, step.source, step.root);
  held->step->record = held->record;
  held->step->roots = {{store_.blobs(), std::move(step.bytes)}};
  return held;
}

Result<StepRecord> StepCatalogue::ShowMemory(MemoryStep step) {
  CKPT_ASSIGN_OR_RETURN(const std::shared_ptr<Held> held, Render(step));
  held->record.place = StepPlace::kMemory;
  held->step->record = held->record;
  const StepRecord& record = held->record;
  MutexLock lock(mutex_);
  memory_[{record.run, record.id}] = held;
  changes_.Add({record.run, record.id, record, StepPlace::kMemory});
  return record;
}

void StepCatalogue::HideMemory(const StepRecord& record) {
  MutexLock lock(mutex_);
  const auto found = memory_.find({record.run, record.id});
  if (found == memory_.end() || found->second->record.manifest != record.manifest) return;
  memory_.erase(found);
  changes_.Add({record.run, record.id, std::nullopt, StepPlace::kMemory});
}

Result<StepRecord> StepCatalogue::Hold(MemoryStep step) {
  CKPT_ASSIGN_OR_RETURN(const std::shared_ptr<Held> held, Render(step));
  StepRecord& record = held->record;
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    record.id = AttemptId(step.model.id, attempt);
    CKPT_RETURN_IF_ERROR(CheckName(record.id, "step"));
    held->step->record = record;
    const auto stored = store_.Resolve(step.run, record.id);
    if (stored && stored->unpacked == record.unpacked) return *stored;
    if (stored) continue;  // taken
    if (stored.error().code != ErrorCode::kNotFound) return Fail(Error(stored.error()));
    CKPT_RETURN_IF_ERROR(CheckRun(step.run, step.root));
    MutexLock lock(mutex_);
    const auto [place, free] = held_.try_emplace({record.run, record.id}, held);
    if (!free && place->second->record.manifest != record.manifest) continue;
    if (free) changes_.Add({record.run, record.id, record});
    return place->second->record;
  }
  return Fail(ErrorCode::kExhausted, StrCat("step '", step.model.id, "' has 10000 attempts"));
}

StepCatalogue::HeldPtr StepCatalogue::Find(const StepRecord& record) const {
  MutexLock lock(mutex_);
  const auto& steps = record.place == StepPlace::kMemory ? memory_ : held_;
  const auto found = steps.find({record.run, record.id});
  if (found == steps.end() || found->second->record.manifest != record.manifest) return nullptr;
  return found->second;
}

Result<StepCatalogue::HeldPtr> StepCatalogue::FindHeld(const StepRecord& record) const {
  if (HeldPtr held = Find(record)) return held;
  return Fail(ErrorCode::kNotFound, StrCat(record.run, "/", record.id, " is not held in memory"));
}

void StepCatalogue::Forget(const HeldPtr& held) {
  const std::string& run = held->record.run;
  const std::string& id = held->record.id;
  const auto stored = store_.Resolve(run, id);
  MutexLock lock(mutex_);
  const auto found = held_.find({run, id});
  if (found == held_.end() || found->second != held) return;
  held_.erase(found);
  changes_.Add({run, id, stored ? std::optional(*stored) : std::nullopt});
}

Result<StepRecord> StepCatalogue::Persist(const StepRecord& record) {
  CKPT_ASSIGN_OR_RETURN(const HeldPtr held, FindHeld(record));
  const StepModel& model = held->step->model;
  std::vector<std::shared_ptr<const void>> holds;  // until the step is published
  std::set<std::string> directories;
  const size_t own = model.blobs.size() - std::min(held->stored, model.blobs.size());
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    const Blob& blob = model.blobs[i];
    if (directories.insert(ParentPath(blob.path)).second) {
      CKPT_ASSIGN_OR_RETURN(holds.emplace_back(), store_.HoldBlobs(blob.path));
    }
    if (i >= own) continue;
    CKPT_RETURN_IF_ERROR(store_.StoreBlob(*held->step->roots.at(store_.blobs()), blob));
    FaultPoint();
  }
  CKPT_ASSIGN_OR_RETURN(StepRecord published,
                        store_.PublishAs(record.id, record.run, model, held->rendered,
                                         held->record.source, held->record.root));
  FaultPoint();
  Forget(held);
  return published;
}

Status StepCatalogue::Release(const StepRecord& record) {
  CKPT_ASSIGN_OR_RETURN(const HeldPtr held, FindHeld(record));
  Forget(held);
  return {};
}

Result<std::shared_ptr<const Step>> StepCatalogue::Load(const StepRecord& record) {
  if (const HeldPtr held = Find(record)) return held->step;
  if (record.place == StepPlace::kStep) return store_.Load(record);
  return Fail(ErrorCode::kNotFound,
              StrCat(record.run, "/memory/", record.id, " is not held in memory any more"));
}

std::vector<StepRecord> StepCatalogue::held() const {
  std::vector<StepRecord> records;
  MutexLock lock(mutex_);
  for (const auto& [name, held] : held_) records.push_back(held->record);
  return records;
}

std::shared_ptr<const void> StepCatalogue::Pin(const StepRecord& record) {
  return record.place == StepPlace::kMemory || Find(record) ? nullptr : store_.Hold(record);
}

Status StepCatalogue::Pull() {
  for (;;) {
    uint64_t from = 0;
    {
      MutexLock lock(mutex_);
      from = seen_;
    }
    CKPT_ASSIGN_OR_RETURN(const StepNews news, store_.News(from));
    MutexLock lock(mutex_);
    if (seen_ != from) continue;  // another thread has told of them
    seen_ = news.generation;
    if (news.all) {
      changes_.Forget();
      return {};
    }
    for (const StepChange& change : news.changes) {
      // A name that is held shows what is held.
      if (!held_.contains({change.run, change.id})) changes_.Add(change);
    }
    return {};
  }
}

Result<StepNews> StepCatalogue::News(uint64_t generation) {
  for (;;) {
    CKPT_RETURN_IF_ERROR(Pull());
    {
      MutexLock lock(mutex_);
      if (auto since = changes_.Since(generation)) {
        return StepNews{changes_.generation(), false, *std::move(since)};
      }
    }
    CKPT_ASSIGN_OR_RETURN(StepNews all, store_.News(0));
    MutexLock lock(mutex_);
    if (all.generation < seen_) continue;  // older than what was told already
    std::erase_if(all.changes, [this](const StepChange& change) {
      return held_.contains({change.run, change.id});
    });
    for (const auto& [name, held] : held_) {
      all.changes.push_back({name.first, name.second, held->record});
    }
    for (const auto& [name, held] : memory_) {
      all.changes.push_back({name.first, name.second, held->record, StepPlace::kMemory});
    }
    all.generation = changes_.generation();
    return all;
  }
}

}  // namespace ckptfs
