// SPDX-License-Identifier: Apache-2.0

#include "mount/snapshot_keeper.h"

#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <utility>

#include "core/base/digest.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/memory_root.h"
#include "formats/families/shipped.h"
#include "formats/snapshot/rank_files.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

constexpr std::chrono::seconds kRetryPause{1};
constexpr std::chrono::minutes kRetryLimit{10};

int64_t WallClock() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// A directory that no other snapshot has, of whatever daemon.
std::string DirectoryOf(const ReceivedStep& received, int64_t now) {
  return StrCat("snapshots/", DigestOf(StrCat(received.name.run, "\n", received.name.job, "\n",
                                              received.name.attempt, "\n", received.step, "\n",
                                              getpid(), "\n", now))
                                  .Hex());
}

}  // namespace

Result<MemoryStep> MemoryStepOf(const Store& store, const ReceivedStep& received,
                                const FamilySet& families) {
  const int64_t now = WallClock();
  const std::string directory = DirectoryOf(received, now);
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
  model.mtime_ns = now;
  model.roots = {store.blobs()};
  for (size_t i = 0; i < model.blobs.size(); ++i) {
    Blob& blob = model.blobs[i];
    blob.stamp = FileStamp{blob.stamp.size, 0, 0, 0};
    blob.mode = access.mode;
    blob.uid = access.uid;
    blob.gid = access.gid;
    blob.store_owned = true;
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = received.files[i].chunks;
  }
  const std::string home = StrCat("snapshot:", received.name.run);
  return MemoryStep{received.name.run, StrCat(home, "/", received.step), home, std::move(model),
                    std::move(root)};
}

SnapshotKeeper::SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh)
    : store_(store), catalogue_(catalogue), refresh_(std::move(refresh)) {}

Result<StepRecord> SnapshotKeeper::Keep(ReceivedStep received) {
  CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
  CKPT_ASSIGN_OR_RETURN(MemoryStep step, MemoryStepOf(store_, received, families));
  received.files.clear();  // the step has them
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, catalogue_.Hold(std::move(step)));
  Show(record);
  auto done = Persist(record);
  if (!done) (void)catalogue_.Release(record);
  Show(record);
  return done;
}

// Where the store cannot be asked what is new, that is seen later.
void SnapshotKeeper::Show(const StepRecord& record) {
  const Status shown = refresh_(record);
  if (shown) return;
  Log(LogLevel::kWarning,
      StrCat("snapshot ", record.run, "/", record.id, " is shown later: ", shown.error().message));
}

Result<StepRecord> SnapshotKeeper::Persist(const StepRecord& record) {
  const auto end = std::chrono::steady_clock::now() + kRetryLimit;
  bool last = false;  // once more after it was stopped
  for (bool said = false;; said = true) {
    auto stored = Caught([&] { return catalogue_.Persist(record); });
    if (stored || stored.error().code == ErrorCode::kDataLoss || last) return stored;
    if (!said) {
      Log(LogLevel::kWarning, StrCat("snapshot ", record.run, "/", record.id,
                                     " stays in memory: ", stored.error().message));
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
