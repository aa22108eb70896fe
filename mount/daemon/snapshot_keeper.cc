// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/snapshot_keeper.h"

#include <unistd.h>

#include <span>
#include <utility>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/commit/kept_files.h"
#include "formats/families/shipped.h"
#include "formats/rank_file/rank_files.h"
#include "mount/logging.h"

namespace ckptfs {

Result<MemoryStep> MemoryStepOf(Store& store, const std::shared_ptr<SaveBytes>& save,
                                const FamilySet& families) {
  const PreparedPart part = save->part().WithChunkLists();
  std::vector<std::string> paths;
  std::vector<const PreparedRank*> ranks;
  for (const PreparedRank& rank : part.ranks) {
    paths.push_back(part.PathOf(rank.rank));
    ranks.push_back(&rank);
  }
  SourceOptions options;
  options.families = &families;
  CKPT_ASSIGN_OR_RETURN(StepModel model,
                        ReadRankFiles(WithStoredFiles(save, store, {}), paths, options));
  if (model.iteration != part.step) return Refuse("its files belong to step ", model.iteration);
  const std::string& run = part.name.run;
  const int64_t time = store.SaveTimeOf(run, part.name.job, part.mtime_ns);
  CKPT_ASSIGN_OR_RETURN(const KeptFiles kept, KeptFiles::Hold(store, run, model, paths.size()));
  OwnRankFiles(model, store.blobs(), time, ranks, kept.blobs());
  for (Blob& blob : std::span(model.blobs).first(paths.size())) {
    blob.mode = 0600;
    blob.uid = geteuid();
    blob.gid = getegid();
  }
  const std::string home = SnapshotHome(run);
  const size_t stored = kept.blobs().size();
  return MemoryStep{
      run,
      StrCat(home, "/", part.step),
      home,
      std::move(model),
      stored == 0 ? std::shared_ptr<const Root>(save) : WithStoredFiles(save, store, kept.holds()),
      stored};
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

Result<SnapshotKeeper::Found> SnapshotKeeper::FindStored(const PartAgain& part) {
  CKPT_RETURN_IF_ERROR(store_.Refresh());
  const auto records = store_.Steps(part.name.run);
  if (!records && records.error().code == ErrorCode::kNotFound) return std::nullopt;
  if (!records) return Fail(Error(records.error()));
  for (const StepRecord& record : *records) {
    if (record.iteration != part.step || record.root != SnapshotHome(part.name.run)) continue;
    const auto step = store_.Load(record);
    // A step that cannot be loaded is another's misfortune: it is lost, being removed or of a
    // newer build, and stays so.
    const auto stays = [](ErrorCode code) {
      return code == ErrorCode::kDataLoss || code == ErrorCode::kNotFound ||
             code == ErrorCode::kUnsupported;
    };
    if (!step && stays(step.error().code)) continue;
    if (!step) return Fail(Error(step.error()));
    const std::vector<Blob>& blobs = (*step)->model.blobs;
    if (blobs.size() < part.world) continue;  // more: of files that it points into
    const bool same = part.place.empty() ? HasChunks(blobs[part.rank], part.file.chunks)
                                         : ParentPath(blobs[part.rank].path) == part.place;
    if (same) return record;
  }
  return std::nullopt;
}

Result<SnapshotKeeper::Found> SnapshotKeeper::FindWhole(const PreparedPart& whole) {
  Found found;
  for (const PreparedRank& rank : whole.ranks) {
    PartAgain part{whole.name, whole.step, rank.rank, whole.world, {}};
    part.file.bytes = rank.bytes;
    part.file.chunks = rank.chunks;
    CKPT_ASSIGN_OR_RETURN(Found record, FindStored(part));
    if (!record || (found && found->manifest != record->manifest)) return std::nullopt;
    found = std::move(record);
  }
  return found;
}

Result<StepMaker::Entered> SnapshotKeeper::Enter(const std::shared_ptr<SaveBytes>& save) {
  if (save->may_be_stored()) {
    CKPT_ASSIGN_OR_RETURN(const Found stored, FindWhole(save->part()));
    if (stored) return Entered{*stored, true};
  }
  CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
  CKPT_ASSIGN_OR_RETURN(MemoryStep step, MemoryStepOf(store_, save, families));
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, catalogue_.Hold(std::move(step)));
  Show(record);
  return Entered{record, false};
}

Result<StepRecord> SnapshotKeeper::Persist(const StepRecord& record) {
  CKPT_ASSIGN_OR_RETURN(StepRecord stored, catalogue_.Persist(record));
  Show(record);
  return stored;
}

void SnapshotKeeper::Release(const StepRecord& record) {
  (void)catalogue_.Release(record);
  Show(record);
}

std::shared_ptr<BlobStream> SnapshotKeeper::Stream(const std::string& path, uint64_t bytes,
                                                   std::weak_ptr<const void> owner) {
  return store_.StreamBlob(path, bytes, std::move(owner));
}

// Where the store cannot be asked what is new, that is seen later.
void SnapshotKeeper::Show(const StepRecord& record) {
  const Status shown = refresh_(record);
  if (shown) return;
  Log(LogLevel::kWarning, StrCat("snapshot ", record.run, "/", record.id,
                                 " will be shown later: ", shown.error().message));
}

}  // namespace ckptfs
