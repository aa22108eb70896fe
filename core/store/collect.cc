// SPDX-License-Identifier: Apache-2.0
//
// Collection removes the steps that a policy does not keep, and the files that no step needs.
// A process may be killed at any point, so the order is fixed: a step's record goes first, then
// its manifest, then files that no manifest names.  Each is removed only by a process that holds
// it alone and has looked once more since.
#include "core/store/collect.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <set>

#include "core/base/file_lock.h"
#include "core/base/strings.h"
#include "core/io/blob_directories.h"
#include "core/io/file_storage.h"
#include "core/manifest/manifest_format.h"
#include "core/records/records.h"
#include "core/store/lives.h"
#include "core/store/prepared_sweep.h"
#include "core/store/side_blobs.h"
#include "core/store/store_state.h"

namespace ckptfs {
namespace {

constexpr size_t kLocksAtOnce = 256;
constexpr int kMaxCollectors = 16;  // that a collector waits for, at the same step
constexpr std::string_view kManifests = "manifests";

// The blobs that a manifest needs of the store, and if the step's bytes are the store's.
Store::State::Needs NeedsOf(const StepModel& model) {
  Store::State::Needs needs;
  for (const Blob& blob : model.blobs) {
    needs.owned = needs.owned || (blob.store_owned && !blob.side);
    for (std::string& directory : BlobDirectoriesOf(model.PathOf(blob))) {
      needs.directories.insert(std::move(directory));
    }
  }
  return needs;
}

}  // namespace

Result<Store::State::Needs> Store::State::NeedsOfManifest(const Digest& manifest) {
  {
    MutexLock lock(mutex);
    const auto known = needs.find(manifest);
    if (known != needs.end()) return known->second;
  }
  CKPT_ASSIGN_OR_RETURN(
      const WholeFile file,
      WholeFile::Open(*storage, ManifestName(manifest), kManifestHeaderSize + kManifestMaxPayload));
  CKPT_ASSIGN_OR_RETURN(const StepModel model, ParseNamedManifest(file.text(), manifest, Blobs()));
  Needs found = NeedsOf(model);
  MutexLock lock(mutex);
  needs.insert_or_assign(manifest, found);
  return found;
}

namespace {

using State = Store::State;

// True if it was published.  A later call does it if there is no room now, or another is there.
Result<bool> WhereThereIsRoom(Status published) {
  if (published) return true;
  const ErrorCode why = published.error().code;
  if (why == ErrorCode::kExhausted || why == ErrorCode::kExists) return false;
  return Fail(std::move(published).error());
}

std::string NameOf(const StepRecord& record) { return StrCat(record.run, "/", record.id); }

// One call of Store::Collect.
class Collection {
 public:
  Collection(Store& store, State& state, const CollectRequest& request)
      : store_(store), state_(state), request_(request) {}

  Result<CollectReport> Run();

 private:
  Result<StoreIndex> Look() const;
  Status RemoveSteps(const StoreIndex& index);
  // The steps of one run that go, oldest first.
  std::vector<StepRecord> Victims(const std::map<std::string, IndexedStep>& steps);
  // By another, since this one looked.
  bool IsGone(const StepName& name) const;
  // Null if the step is gone, or somebody uses it: then it is told of.
  std::unique_ptr<const FileLock> LockStep(const StepRecord& record, const StepName& name);
  Status RemoveStep(const StepRecord& record, const StepName& name);
  // Digests of live steps; nothing if a record cannot be read.
  std::optional<std::set<Digest>> Live(const StoreIndex& index);
  Result<std::vector<Digest>> ManifestsThere() const;
  Status ReclaimManifests(const std::set<Digest>& live);
  Result<std::optional<PreparedUse>> Prepared();
  // Directories that some manifest needs, or daemons have in work; nothing if one cannot be read.
  Result<std::optional<std::set<std::string>>> NeededDirectories();
  // A live step's manifest that is not there, if any.
  Result<std::optional<Digest>> MissingOf(const std::set<Digest>& live) const;
  Status ReclaimDirectories(const std::set<Digest>& live);
  // True if builds that do not know that records go no longer publish in the run.
  Result<bool> IsClosedToOld(const std::string& run);
  Result<bool> DeleteRetired(const StepName& name);
  Status ReclaimRecords(const StepName& newest, bool durable);
  void Note(std::string text) { report_.notes.push_back(std::move(text)); }

  std::unique_ptr<const FileLock> LockManifest(const Digest& manifest) const {
    return FileLock::Take(StrCat(state_.directory, "/", ManifestName(manifest)), O_RDWR,
                          LOCK_EX | LOCK_NB);
  }

  Store& store_;
  State& state_;
  const CollectRequest& request_;
  CollectReport report_;
  std::set<Digest> gone_;                      // manifests that were reclaimed, or would be
  std::map<std::string, bool> closed_to_old_;  // by run
};

Result<StoreIndex> Collection::Look() const {
  CKPT_RETURN_IF_ERROR(state_.CheckPresent());
  RecordTexts unused;
  const KnownRecord known = [this](const StepName& name) { return state_.Known(name); };
  return BuildStoreIndex(*state_.storage, "", known, unused);
}

std::vector<StepRecord> Collection::Victims(const std::map<std::string, IndexedStep>& steps) {
  std::vector<StepRecord> owned;
  if (steps.empty()) return owned;
  const std::string& run = steps.begin()->second.name.run;
  const auto tags = store_.Tags(run);
  if (!tags) {
    Note(StrCat(run, ": all steps stay: ", tags.error().message));
    return {};
  }
  std::set<std::string_view> tagged;
  for (const StepTag& tag : *tags) tagged.insert(tag.id);
  for (const auto& [id, step] : steps) {
    if (!step.record) {
      Note(StrCat(step.name.run, ": all steps stay: ", step.record.error().message));
      return {};
    }
    const auto needs = state_.NeedsOfManifest(step.record->manifest);
    if (!needs && !IsGone(step.name)) {
      Note(StrCat(NameOf(*step.record), " stays: ", needs.error().message));
    }
    if (needs && needs->owned) owned.push_back(*step.record);
  }
  std::set<std::string> newest;
  for (StepRecord& step : NewestOf(owned, std::max<uint64_t>(request_.keep_last, 1))) {
    newest.insert(std::move(step.id));
  }
  std::sort(owned.begin(), owned.end(), IsOlder);
  std::erase_if(owned, [&](const StepRecord& step) {
    const bool multiple = request_.keep_every != 0 && step.iteration % request_.keep_every == 0;
    return multiple || newest.contains(step.id) || tagged.contains(step.id);
  });
  return owned;
}

bool Collection::IsGone(const StepName& name) const {
  const auto deleted = IsDeleted(*state_.storage, name);
  const auto retired = IsRetired(*state_.storage, name);
  return (deleted && *deleted) || (retired && *retired);
}

// Waits for another collector, which has the lock alone while it
// removes the step.  Those that only use the step share the lock.
std::unique_ptr<const FileLock> Collection::LockStep(const StepRecord& record,
                                                     const StepName& name) {
  for (int race = 0; race < kMaxCollectors; ++race) {
    auto lock = LockManifest(record.manifest);
    if (lock) return lock;
    const auto waited = state_.HoldManifest(record.manifest);
    if (!waited || IsGone(name)) return nullptr;
  }
  report_.held.push_back(record);
  return nullptr;
}

Status Collection::RemoveStep(const StepRecord& record, const StepName& name) {
  if (request_.let_go) request_.let_go(record);
  const auto lock = LockStep(record, name);
  if (!lock) return {};
  if (!request_.dry_run) {
    const Status removed = store_.Remove(record);
    if (!removed && removed.error().code == ErrorCode::kNotFound) return {};  // by another
    CKPT_RETURN_IF_ERROR(removed);
  }
  report_.removed.push_back(record);
  return {};
}

Status Collection::RemoveSteps(const StoreIndex& index) {
  if (request_.keep_last == 0 && request_.keep_every == 0) return {};
  for (const auto& [run, steps] : index.runs) {
    if (request_.run && *request_.run != run) continue;
    for (const StepRecord& step : Victims(steps)) {
      CKPT_RETURN_IF_ERROR(RemoveStep(step, steps.at(step.id).name));
    }
  }
  return {};
}

std::optional<std::set<Digest>> Collection::Live(const StoreIndex& index) {
  std::set<Digest> live;
  for (const auto& [run, steps] : index.runs) {
    for (const auto& [id, step] : steps) {
      if (!step.record) {
        Note(StrCat("nothing is reclaimed: ", step.record.error().message));
        return std::nullopt;
      }
      live.insert(step.record->manifest);
    }
  }
  return live;
}

Result<std::vector<Digest>> Collection::ManifestsThere() const {
  CKPT_ASSIGN_OR_RETURN(const auto names, ListFilesBelow(*state_.storage, kManifests));
  std::vector<Digest> digests;
  for (const std::string& name : names) {
    const auto digest = DigestNamed(std::string_view(name).substr(kManifests.size() + 1));
    if (digest) digests.push_back(*digest);
  }
  return digests;
}

Status Collection::ReclaimManifests(const std::set<Digest>& live) {
  CKPT_ASSIGN_OR_RETURN(std::vector<Digest> dead, ManifestsThere());
  std::erase_if(dead, [&](const Digest& digest) { return live.contains(digest); });
  CKPT_ASSIGN_OR_RETURN(const auto used, Prepared());
  if (!used) return {};
  std::erase_if(dead, [&](const Digest& digest) { return used->manifests.contains(digest); });
  for (size_t at = 0; at < dead.size(); at += kLocksAtOnce) {
    std::vector<std::pair<Digest, std::unique_ptr<const FileLock>>> locked;
    for (size_t i = at; i < std::min(dead.size(), at + kLocksAtOnce); ++i) {
      auto lock = LockManifest(dead[i]);
      if (lock)
        locked.emplace_back(dead[i], std::move(lock));
      else
        ++report_.busy;
    }
    // Once more under the locks: a holder of one may have published meanwhile.
    std::optional<std::set<Digest>> now = live;
    if (!request_.dry_run && !locked.empty()) {
      CKPT_ASSIGN_OR_RETURN(const StoreIndex index, Look());
      now = Live(index);
    }
    for (const auto& [digest, lock] : locked) {
      if (!now || now->contains(digest)) continue;
      const Status removed =
          request_.dry_run ? Status() : state_.storage->Remove(ManifestName(digest));
      const bool was_gone = !removed && removed.error().code == ErrorCode::kNotFound;
      if (!was_gone) CKPT_RETURN_IF_ERROR(removed);
      gone_.insert(digest);
      report_.manifests += was_gone ? 0 : 1;
    }
  }
  MutexLock lock(state_.mutex);
  for (const Digest& digest : gone_) {
    if (!request_.dry_run) state_.needs.erase(digest);
  }
  return {};
}

// The saves that other daemons have in work; nothing if that cannot be told.
Result<std::optional<PreparedUse>> Collection::Prepared() {
  CKPT_ASSIGN_OR_RETURN(PreparedUse use, SweepPrepared(*state_.storage, state_.directory,
                                                       state_.presences, request_.dry_run));
  report_.records += request_.dry_run ? 0 : use.records;
  report_.watched = use.watched;
  if (!use.unknown) return std::optional(std::move(use));
  for (std::string& note : use.notes) Note(std::move(note));
  return std::optional<PreparedUse>();
}

Result<std::optional<std::set<std::string>>> Collection::NeededDirectories() {
  CKPT_ASSIGN_OR_RETURN(const auto used, Prepared());
  if (!used) return std::optional<std::set<std::string>>();
  std::set<std::string> needed = used->directories;
  CKPT_ASSIGN_OR_RETURN(const std::vector<Digest> there, ManifestsThere());
  for (const Digest& digest : there) {
    if (request_.dry_run && gone_.contains(digest)) continue;
    const auto needs = state_.NeedsOfManifest(digest);
    if (!needs && needs.error().code == ErrorCode::kNotFound) continue;  // no step's any more
    if (!needs) {
      Note(StrCat("no blobs are reclaimed: ", ManifestName(digest), ": ", needs.error().message));
      return std::optional<std::set<std::string>>();
    }
    needed.insert(needs->directories.begin(), needs->directories.end());
  }
  return std::optional(std::move(needed));
}

Result<std::optional<Digest>> Collection::MissingOf(const std::set<Digest>& live) const {
  CKPT_ASSIGN_OR_RETURN(const std::vector<Digest> there, ManifestsThere());
  const std::set<Digest> present(there.begin(), there.end());
  for (const Digest& digest : live) {
    if (!present.contains(digest)) return std::optional(digest);
  }
  return std::optional<Digest>();
}

// A live step whose manifest is not there may need any of them.
Status Collection::ReclaimDirectories(const std::set<Digest>& live) {
  CKPT_ASSIGN_OR_RETURN(std::optional<Digest> missing, MissingOf(live));
  if (missing) {  // unless another has collected that step meanwhile
    CKPT_ASSIGN_OR_RETURN(const StoreIndex index, Look());
    const auto now = Live(index);
    if (!now) return {};
    CKPT_ASSIGN_OR_RETURN(missing, MissingOf(*now));
  }
  if (missing) {
    Note(StrCat("no blobs are reclaimed: a step's manifest ", missing->Hex(), " is missing"));
    return {};
  }
  CKPT_ASSIGN_OR_RETURN(std::vector<std::string> unneeded, ListBlobDirectories(state_.directory));
  CKPT_ASSIGN_OR_RETURN(auto needed, NeededDirectories());
  if (!needed) return {};
  std::erase_if(unneeded, [&](const std::string& name) { return needed->contains(name); });
  for (size_t at = 0; at < unneeded.size(); at += kLocksAtOnce) {
    std::vector<std::pair<std::string, std::unique_ptr<const FileLock>>> claimed;
    for (size_t i = at; i < std::min(unneeded.size(), at + kLocksAtOnce); ++i) {
      auto claim = ClaimBlobDirectory(state_.directory, unneeded[i]);
      if (claim)
        claimed.emplace_back(unneeded[i], std::move(claim));
      else
        ++report_.busy;
    }
    // Once more: a holder of one may have published meanwhile.
    CKPT_ASSIGN_OR_RETURN(needed, NeededDirectories());
    if (!needed) return {};
    for (const auto& [name, claim] : claimed) {
      if (needed->contains(name)) continue;
      const uint64_t bytes = BytesOfBlobDirectory(state_.directory, name);
      const Status removed =
          request_.dry_run ? Status() : RemoveBlobDirectory(state_.directory, name);
      const bool was_gone = !removed && removed.error().code == ErrorCode::kNotFound;
      if (!removed && !was_gone) Note(StrCat("blobs/", name, " stays: ", removed.error().message));
      if (!removed) continue;
      report_.bytes += bytes;
      ++report_.directories;
    }
  }
  return {};
}

Result<bool> Collection::IsClosedToOld(const std::string& run) {
  const auto [closed, first] = closed_to_old_.try_emplace(run);
  if (!first) return closed->second;
  CKPT_ASSIGN_OR_RETURN(const auto claim, LatestClaim(*state_.storage, run));
  closed->second = claim && !claim->old;
  if (!claim || closed->second || !claim->settled) return closed->second;
  const Claim renewed{claim->n + 1, claim->root};  // settled as that was: nobody came between
  CKPT_ASSIGN_OR_RETURN(const bool published,
                        WhereThereIsRoom(PublishClaim(*state_.storage, run, renewed)));
  if (!published) return false;
  CKPT_ASSIGN_OR_RETURN(closed->second,
                        WhereThereIsRoom(SettleClaim(*state_.storage, run, renewed)));
  return closed->second;
}

// The deletion of a step that was retired is there.  False if there is no room for it yet.
Result<bool> Collection::DeleteRetired(const StepName& name) {
  const auto text = ReadWhole(*state_.storage, RetiredName(name), kRecordMaxBytes);
  if (!text) return false;
  Status published = PublishText(*state_.storage, DeletedName(name), *text);
  if (!published && published.error().code == ErrorCode::kExists) return true;
  return WhereThereIsRoom(std::move(published));
}

// The records of an id whose newest step is gone, so that nobody lists them any more.  `deleted`
// goes on telling that their numbers were used.  `durable`: the newest one's deletion is.
Status Collection::ReclaimRecords(const StepName& newest, bool durable) {
  const std::string of = StrCat("/", newest.run, "/", newest.id);
  CKPT_ASSIGN_OR_RETURN(const auto records, ListFilesBelow(*state_.storage, StrCat("steps", of)));
  std::vector<StepName> retired;
  for (const std::string& record : records) {
    auto old = ParseRetiredName(record);
    const auto name = old ? old : ParseStepName(record, "steps");
    if (!name || name->n > newest.n) return {};  // there is one again
    CKPT_ASSIGN_OR_RETURN(const bool gone, IsDeleted(*state_.storage, *name));
    if (old && !gone) retired.push_back(*std::move(old));
    if (!old && !gone) return {};  // the process that replaced it was killed before it said so
  }
  CKPT_ASSIGN_OR_RETURN(const bool closed, IsClosedToOld(newest.run));
  if (!closed) return {};
  for (const StepName& name : retired) {
    CKPT_ASSIGN_OR_RETURN(const bool deleted, DeleteRetired(name));
    if (!deleted) return {};
  }
  if (!durable || records.size() > 1) {
    CKPT_RETURN_IF_ERROR(SyncPath(StrCat(state_.directory, "/deleted", of)));
  }
  for (const std::string& record : records) FileStorage::Discard(state_.directory, record);
  return {};
}

Result<CollectReport> Collection::Run() {
  CKPT_ASSIGN_OR_RETURN(StoreIndex index, Look());
  CKPT_RETURN_IF_ERROR(RemoveSteps(index));
  std::vector<StepName> removed;
  // The locks show what others did meanwhile.
  for (const StepRecord& record : report_.removed) {
    const IndexedStep* const step = index.Find(record.run, record.id);
    if (step == nullptr) continue;
    removed.push_back(step->name);
    index.Drop(removed.back());
  }
  const auto live = Live(index);
  if (live) {
    CKPT_RETURN_IF_ERROR(ReclaimManifests(*live));
    CKPT_RETURN_IF_ERROR(ReclaimDirectories(*live));
  }
  if (!request_.dry_run) {
    for (const StepName& name : removed) CKPT_RETURN_IF_ERROR(ReclaimRecords(name, true));
    for (const StepName& name : index.dead) CKPT_RETURN_IF_ERROR(ReclaimRecords(name, false));
    CKPT_RETURN_IF_ERROR(store_.Sweep());
    RemoveUnusedHolds(state_.directory);
    FileStorage::RemoveLeftovers(state_.directory);
  }
  return std::move(report_);
}

}  // namespace

Result<CollectReport> Store::Collect(const CollectRequest& request) {
  if (state_->directory.empty()) {
    return Fail(ErrorCode::kUnsupported,
                "only a store in a directory of this machine can be "
                "collected");
  }
  return Collection(*this, *state_, request).Run();
}

Result<std::shared_ptr<const void>> Store::HoldBlobs(std::string_view path) {
  const std::string_view directory = BlobDirectoryOf(path);
  if (state_->directory.empty() || directory.empty()) return nullptr;
  return HoldBlobDirectory(state_->directory, directory);
}

std::shared_ptr<const void> Store::Hold(const StepRecord& record) {
  return state_->HoldManifest(record.manifest);
}

std::shared_ptr<const void> Store::State::HoldManifest(const Digest& manifest) const {
  if (directory.empty()) return nullptr;
  return FileLock::Take(StrCat(directory, "/", ManifestName(manifest)), O_RDONLY, LOCK_SH);
}

}  // namespace ckptfs
