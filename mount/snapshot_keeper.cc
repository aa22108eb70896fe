// SPDX-License-Identifier: Apache-2.0

#include "mount/snapshot_keeper.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/digest.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/commit/world_commit.h"
#include "core/io/memory_root.h"
#include "formats/families/shipped.h"
#include "formats/snapshot/rank_files.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kRetryPause{1};
constexpr std::chrono::minutes kRetryLimit{10};

}  // namespace

Result<MemoryStep> MemoryStepOf(Store& store, const ReceivedStep& received,
                                const FamilySet& families) {
  const std::string directory = StrCat("snapshots/", RandomDigest().Hex());
  const OwnerAndMode access{0600, geteuid(), getegid(), false};
  auto root =
      std::make_shared<MemoryRoot>(StrCat("snapshot ", received.name.run, "/", received.step));
  std::vector<std::string> paths;
  for (size_t rank = 0; rank < received.files.size(); ++rank) {
    const ReceivedFile& file = received.files[rank];
    paths.push_back(fmt::format("{}/rank-{:05}.safetensors", directory, rank));
    CKPT_RETURN_IF_ERROR(root->Add(paths.back(), file.rope, file.lease, access));
  }
  SourceOptions options;
  options.families = &families;
  CKPT_ASSIGN_OR_RETURN(StepModel model, ReadRankFiles(root, paths, options));
  if (model.iteration != received.step) return Refuse("its files are of step ", model.iteration);
  std::vector<const std::vector<Digest>*> chunks;
  for (const ReceivedFile& file : received.files) chunks.push_back(&file.chunks);
  OwnRankFiles(model, store.blobs(), SaveTimeOf(store, received.name.run), chunks);
  for (Blob& blob : model.blobs) {
    blob.mode = access.mode;
    blob.uid = access.uid;
    blob.gid = access.gid;
  }
  const std::string home = SnapshotHome(received.name.run);
  return MemoryStep{received.name.run, StrCat(home, "/", received.step), home, std::move(model),
                    std::move(root)};
}

WorldCommit::ModelOf ModelOfRankFiles() {
  return [](const std::shared_ptr<const Root>& blobs,
            const std::vector<std::string>& paths) -> Result<StepModel> {
    CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
    SourceOptions options;
    options.families = &families;
    return ReadRankFiles(blobs, paths, options);
  };
}

SnapshotKeeper::SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh)
    : store_(store), catalogue_(catalogue), refresh_(std::move(refresh)) {}

Result<SnapshotKeeper::Found> SnapshotKeeper::FindStored(const PartAgain& part) {
  CKPT_RETURN_IF_ERROR(store_.Refresh());
  const auto records = store_.Steps(part.name.run);
  if (!records && records.error().code == ErrorCode::kNotFound) return std::nullopt;
  if (!records) return Fail(Error(records.error()));
  for (const StepRecord& record : *records) {
    if (record.iteration != part.step || record.root != SnapshotHome(part.name.run)) continue;
    const auto step = store_.Load(record);
    if (!step && step.error().code == ErrorCode::kDataLoss) continue;  // another's misfortune
    if (!step) return Fail(Error(step.error()));
    const std::vector<Blob>& blobs = (*step)->model.blobs;
    if (blobs.size() != part.world || blobs[part.rank].stamp.size != part.file.bytes) continue;
    if (blobs[part.rank].chunks == part.file.chunks) return record;
  }
  return std::nullopt;
}

Result<SnapshotKeeper::Found> SnapshotKeeper::FindWhole(const ReceivedStep& received) {
  Found found;
  const auto world = static_cast<uint32_t>(received.files.size());
  for (uint32_t rank = 0; rank < world; ++rank) {
    const ReceivedFile& file = received.files[rank];
    PartAgain part{received.name, received.step, rank, world, {}};
    part.file.bytes = file.bytes;
    part.file.chunks = file.chunks;
    CKPT_ASSIGN_OR_RETURN(Found record, FindStored(part));
    if (!record || (found && found->manifest != record->manifest)) return std::nullopt;
    found = std::move(record);
  }
  return found;
}

Result<StepRecord> SnapshotKeeper::Keep(ReceivedStep received) {
  const bool again = std::any_of(received.files.begin(), received.files.end(),
                                 [](const ReceivedFile& file) { return file.again; });
  if (again) {
    CKPT_ASSIGN_OR_RETURN(const auto stored, Insist(StrCat(received.name.run, "/", received.step),
                                                    [&] { return FindWhole(received); }));
    if (stored) return *stored;
  }
  CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
  CKPT_ASSIGN_OR_RETURN(MemoryStep step, MemoryStepOf(store_, received, families));
  received.files.clear();  // the step has them
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, catalogue_.Hold(std::move(step)));
  Show(record);
  auto done = Insist(StrCat(record.run, "/", record.id), [&] {
    return catalogue_.Persist(record).map([](const StepRecord& stored) { return Found(stored); });
  });
  if (!done) (void)catalogue_.Release(record);
  Show(record);
  if (!done) return Fail(std::move(done).error());
  return **done;
}

// Where the store cannot be asked what is new, that is seen later.
void SnapshotKeeper::Show(const StepRecord& record) {
  const Status shown = refresh_(record);
  if (shown) return;
  Log(LogLevel::kWarning,
      StrCat("snapshot ", record.run, "/", record.id, " is shown later: ", shown.error().message));
}

Result<SnapshotKeeper::Found> SnapshotKeeper::Insist(const std::string& name,
                                                     const std::function<Result<Found>()>& act) {
  const auto end = std::chrono::steady_clock::now() + kRetryLimit;
  bool last = false;  // once more after it was stopped
  for (bool said = false;; said = true) {
    auto stored = Caught(act);
    if (stored || stored.error().code == ErrorCode::kDataLoss || last) return stored;
    if (!said) {
      Log(LogLevel::kWarning,
          StrCat("snapshot ", name, " stays in memory: ", stored.error().message));
    }
    last = !Pause() || std::chrono::steady_clock::now() >= end;
  }
}

bool SnapshotKeeper::Pause() {
  MutexLock lock(mutex_);
  const auto end = std::chrono::steady_clock::now() + kRetryPause;
  while (!stopping_ && stop_.WaitUntil(mutex_, end)) {
  }
  return !stopping_;
}

void SnapshotKeeper::Stop() {
  MutexLock lock(mutex_);
  stopping_ = true;
  stop_.NotifyAll();
}

}  // namespace ckptfs
