// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/snapshot_keeper.h"

#include <unistd.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/base/digest.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/commit/kept_files.h"
#include "core/commit/world_commit.h"
#include "core/io/file_stamp.h"
#include "core/io/memory_root.h"
#include "formats/families/shipped.h"
#include "formats/rank_file/rank_files.h"
#include "mount/logging.h"

namespace ckptfs {

Result<MemoryStep> MemoryStepOf(Store& store, const ReceivedStep& received,
                                const FamilySet& families) {
  const OwnerAndMode access{0600, geteuid(), getegid(), false};
  const SaveBytes* const save = received.save.get();
  AttemptName name = received.name;
  name.life = received.life;
  const PreparedPart part =
      save ? save->part() : PreparedPart{std::move(name), received.step, 0, 0, {}};
  auto memory =
      std::make_shared<MemoryRoot>(StrCat("snapshot ", received.name.run, "/", received.step));
  std::vector<std::string> paths;
  for (size_t rank = 0; rank < received.files.size(); ++rank) {
    const ReceivedFile& file = received.files[rank];
    paths.push_back(part.PathOf(static_cast<uint32_t>(rank)));
    if (save == nullptr) {
      CKPT_RETURN_IF_ERROR(memory->Add(paths.back(), file.rope, file.lease, access));
    }
  }
  const std::shared_ptr<const Root> own =
      save ? std::shared_ptr<const Root>(received.save) : std::move(memory);
  SourceOptions options;
  options.families = &families;
  CKPT_ASSIGN_OR_RETURN(StepModel model,
                        ReadRankFiles(WithStoredFiles(own, store, {}), paths, options));
  if (model.iteration != received.step) return Refuse("its files belong to step ", model.iteration);
  std::vector<const std::vector<Digest>*> chunks;
  for (const ReceivedFile& file : received.files) chunks.push_back(&file.chunks);
  const int64_t time = store.SaveTimeOf(received.name.run, received.name.job,
                                        save ? save->part().mtime_ns : NowNs());
  CKPT_ASSIGN_OR_RETURN(const KeptFiles kept,
                        KeptFiles::Hold(store, received.name.run, model, paths.size()));
  OwnRankFiles(model, store.blobs(), time, chunks, kept.blobs());
  for (Blob& blob : std::span(model.blobs).first(paths.size())) {
    blob.mode = access.mode;
    blob.uid = access.uid;
    blob.gid = access.gid;
  }
  const std::string home = SnapshotHome(received.name.run);
  const size_t stored = kept.blobs().size();
  return MemoryStep{received.name.run,
                    StrCat(home, "/", received.step),
                    home,
                    std::move(model),
                    stored == 0 ? own : WithStoredFiles(own, store, kept.holds()),
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

SnapshotKeeper::SnapshotKeeper(Store& store, StepCatalogue& catalogue, Refresh refresh,
                               Spooler* spooler, Retries retries)
    : store_(store),
      catalogue_(catalogue),
      refresh_(std::move(refresh)),
      spooler_(spooler),
      retries_(retries) {}

SnapshotKeeper::~SnapshotKeeper() {
  Stop();
  if (thread_.joinable()) thread_.join();
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
    const bool same = part.place.empty() ? blobs[part.rank].chunks == part.file.chunks
                                         : ParentPath(blobs[part.rank].path) == part.place;
    if (same) return record;
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

Result<SnapshotKeeper::Entered> SnapshotKeeper::Enter(const ReceivedStep& received) {
  const bool again = std::any_of(received.files.begin(), received.files.end(),
                                 [](const ReceivedFile& file) { return file.again; });
  if (again) {
    CKPT_ASSIGN_OR_RETURN(const Found stored, FindWhole(received));
    if (stored) return Entered{*stored, true};
  }
  CKPT_ASSIGN_OR_RETURN(const FamilySet families, ShippedFamilies());
  CKPT_ASSIGN_OR_RETURN(MemoryStep step, MemoryStepOf(store_, received, families));
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, catalogue_.Hold(std::move(step)));
  Show(record);
  return Entered{record, false};
}

Result<StepRecord> SnapshotKeeper::Keep(ReceivedStep received) {
  const Save save = received.save;
  const std::string name = StrCat(received.name.run, "/", received.step);
  if (save) spooler_->Begin(*save);
  std::optional<Entered> entered = Shown(save);
  if (!entered) {
    const auto final = [](ErrorCode code) {
      return code == ErrorCode::kInvalid || code == ErrorCode::kExists ||
             code == ErrorCode::kDataLoss || code == ErrorCode::kUnsupported;
    };
    CKPT_ASSIGN_OR_RETURN(entered, Insist(name, save, final, [&] { return Enter(received); }));
  }
  if (entered->stored) return entered->record;
  received.files.clear();  // the step has them
  const StepRecord& record = entered->record;
  auto done = Insist(
      name, save, [](ErrorCode code) { return code == ErrorCode::kDataLoss; },
      [&] {
        return catalogue_.Persist(record).map([](const StepRecord& stored) {
          return Entered{stored, true};
        });
      });
  if (save && save->stays()) return Fail(std::move(done).error());  // it is shown until the end
  if (!done) (void)catalogue_.Release(record);
  Show(record);
  if (done) return done->record;
  Error error = std::move(done).error();
  const bool disk = save && save->on_disk() && error.code == ErrorCode::kDataLoss;
  return Fail(disk ? std::move(error).WithContext(spooler_->directory()) : std::move(error));
}

// ---- what waits behind others --------------------------------------------------

void SnapshotKeeper::ShowSoon(ReceivedStep received) {
  MutexLock lock(mutex_);
  to_show_.push_back(std::move(received));
  if (!thread_.joinable()) thread_ = std::thread([this] { ShowAll(); });
  moved_.NotifyAll();
}

void SnapshotKeeper::ShowAll() {
  while (true) {
    ReceivedStep received;
    {
      MutexLock lock(mutex_);
      while (to_show_.empty() && !stopping_) moved_.Wait(mutex_);
      if (stopping_) return;
      received = std::move(to_show_.front());
      to_show_.pop_front();
      showing_ = received.save;
    }
    // A failed one is tried again when it is its turn.
    auto entered = Caught([&] { return Enter(received); });
    MutexLock lock(mutex_);
    if (entered) shown_[received.save] = *std::move(entered);
    showing_.reset();
    moved_.NotifyAll();
  }
}

std::optional<SnapshotKeeper::Entered> SnapshotKeeper::Shown(const Save& save) {
  if (!save) return std::nullopt;
  MutexLock lock(mutex_);
  std::erase_if(to_show_, [&](const ReceivedStep& step) { return step.save == save; });
  while (showing_ == save) moved_.Wait(mutex_);
  const auto node = shown_.extract(save);
  return node.empty() ? std::nullopt : std::optional(node.mapped());
}

// Where the store cannot be asked what is new, that is seen later.
void SnapshotKeeper::Show(const StepRecord& record) {
  const Status shown = refresh_(record);
  if (shown) return;
  Log(LogLevel::kWarning, StrCat("snapshot ", record.run, "/", record.id,
                                 " will be shown "
                                 "later: ",
                                 shown.error().message));
}

Result<SnapshotKeeper::Entered> SnapshotKeeper::Insist(
    const std::string& name, const Save& save, const std::function<bool(ErrorCode)>& final,
    const std::function<Result<Entered>()>& act) {
  const auto end = std::chrono::steady_clock::now() + retries_.limit;
  bool last = false;  // once more after it was stopped
  for (bool said = false;; said = true) {
    auto stored = Caught(act);
    if (stored || final(stored.error().code) || last) return stored;
    if (save) spooler_->Fails(*save);
    if (!said) {
      Log(LogLevel::kWarning,
          StrCat("snapshot ", name, " stays in ",
                 save && save->on_disk() ? "the spool: " : "memory: ", stored.error().message));
    }
    last = !Pause();
    if (last && save && spooler_->Leave(*save)) return stored;
    // A name that another's run has is not free again.
    const bool safe = save && save->on_disk() && stored.error().code != ErrorCode::kExists;
    last = last || (!safe && std::chrono::steady_clock::now() >= end);
  }
}

bool SnapshotKeeper::Pause() {
  MutexLock lock(mutex_);
  const auto end = std::chrono::steady_clock::now() + retries_.pause;
  while (!stopping_ && moved_.WaitUntil(mutex_, end)) {
  }
  return !stopping_;
}

void SnapshotKeeper::Stop() {
  MutexLock lock(mutex_);
  stopping_ = true;
  moved_.NotifyAll();
}

}  // namespace ckptfs
