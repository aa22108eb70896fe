// SPDX-License-Identifier: Apache-2.0
//
// Publishing and removing.  Everything here asks the storage for names that are
// known, or for those of one run's claims and of one step: its cost does not
// depend on how many steps the store has.
#include "core/base/fault_point.h"
#include "core/base/parallel.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/io/file_storage.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_format.h"
#include "core/model/side_blob.h"
#include "core/records/records.h"
#include "core/store/blob_copy.h"
#include "core/store/catalogue.h"
#include "core/store/side_blobs.h"
#include "core/store/store_index.h"
#include "core/store/store_state.h"

namespace ckptfs {
namespace {

constexpr int kMaxPublishRaces = 100;

}  // namespace

Status Store::State::PutManifest(const std::string& bytes, const Digest& digest) {
  const std::string name = ManifestName(digest);
  Status published = PublishText(*storage, name, bytes);
  if (published || published.error().code != ErrorCode::kExists) return published;
  const auto there = ReadWhole(*storage, name, bytes.size());
  const auto whole = there ? OpenManifest(*there) : Fail(Error(there.error()));
  if (whole && whole->digest == digest) return {};  // of whatever version
  // Damaged since it was published: its name says what it has to hold.
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage->Create(name));
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(bytes))));
  return writer->Close();
}

Result<std::shared_ptr<const void>> Store::State::PutHeldManifest(const std::string& bytes,
                                                                  const Digest& digest) {
  for (int race = 0; race < kMaxPublishRaces; ++race) {
    const Status put = PutManifest(bytes, digest);
    const bool collected = !put && put.error().code == ErrorCode::kNotFound;  // between two looks
    if (collected) continue;
    if (!put) return Fail(Error(put.error()));
    auto held = HoldManifest(digest);
    if (held || directory.empty()) return held;
  }
  return Fail(ErrorCode::kExhausted,
              StrCat(ManifestName(digest), " is being removed all the time"));
}

// Success if no step of another root is in the run.
Status Store::State::CheckOthers(const std::string& run, const std::string& root) {
  RecordTexts unused;
  const KnownRecord known = [this](const StepName& name) { return Known(name); };
  CKPT_ASSIGN_OR_RETURN(const StoreIndex fresh, BuildStoreIndex(*storage, run, known, unused));
  const auto found = fresh.runs.find(run);
  if (found == fresh.runs.end()) return {};
  for (const auto& [id, step] : found->second) {
    if (!step.record) return Fail(Error(step.record.error()));
    if (step.record->root == root) continue;
    return Fail(
        Error{ErrorCode::kExists, StrCat("run '", run, "' belongs to ", step.record->root)}.Needing(
            "adopt under another name (--name)"));
  }
  return {};
}

// The run's newest claim is ours, and settled.
Status Store::State::ClaimRun(const std::string& run, const std::string& root) {
  for (int race = 0; race < kMaxPublishRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(auto claim, LatestClaim(*storage, run));
    const bool ours = claim && claim->root == root;
    if (ours && claim->settled) return {};
    if (!ours) {
      if (claim) CKPT_RETURN_IF_ERROR(CheckOthers(run, root));
      claim = Claim{claim ? claim->n + 1 : 0, root};
      const Status published = PublishClaim(*storage, run, *claim);
      if (!published && published.error().code == ErrorCode::kExists) continue;
      CKPT_RETURN_IF_ERROR(published);
    }
    CKPT_RETURN_IF_ERROR(CheckOthers(run, root));
    return SettleClaim(*storage, run, *claim);
  }
  return Fail(ErrorCode::kExhausted, StrCat("run '", run, "' is being claimed all the time"));
}

// The record of a live step; nothing if it is damaged.
Result<std::optional<StepRecord>> Store::State::RecordOf(const Incarnation& live) {
  CKPT_ASSIGN_OR_RETURN(const std::string text,
                        ReadWhole(*storage, StepRecordName(live.name), kRecordMaxBytes));
  auto record = ParseStepRecord(text, live.name);
  if (!record) return std::optional<StepRecord>();
  return std::optional(*std::move(record));
}

namespace {

// The record of a provisional step that turned out to be whole.
StepRecord Confirmed(StepRecord record) {
  record.provisional = false;
  record.replaces = record.manifest;
  return record;
}

PublishHow Alone(PublishHow how) {
  how.join = false;
  return how;
}

}  // namespace

// Builds of before wrote the same step otherwise, with facts as documents: then what this build
// reads of their manifest tells.
bool Store::State::IsSame(const std::optional<StepRecord>& there, const RenderedStep& rendered) {
  if (!there) return false;
  if (there->unpacked == rendered.unpacked || there->manifest == rendered.manifest) return true;
  const auto bytes =
      ReadWhole(*storage, ManifestName(there->manifest), kManifestHeaderSize + kManifestMaxPayload);
  if (!bytes) return false;
  const auto step = ParseNamedManifest(*bytes, there->manifest, Blobs());
  if (!step) return false;
  const auto same_as = IdentityDigest(*step, Blobs());
  return same_as && *same_as == rendered.unpacked;
}

// Makes `wanted` the record after `last`, in whose place it comes if that is live; false if
// somebody else was faster.
Result<bool> Store::State::TryRecord(const StepRecord& wanted, const Incarnation& last) {
  // The greatest number is the step: the one it replaces is gone with this.
  const std::string name = StepRecordName(last.next());
  const std::string text = RenderStepRecord(wanted);
  const Status published = PublishText(*storage, name, text);
  if (!published) {
    const ErrorCode why = published.error().code;  // kNotFound: such a record was reclaimed
    if (why != ErrorCode::kExists && why != ErrorCode::kNotFound)
      return Fail(Error(published.error()));
    return false;
  }
  // Others may have used the number, and reclaimed its record, since we looked.
  CKPT_ASSIGN_OR_RETURN(const bool deleted, IsDeleted(*storage, last.next()));
  CKPT_ASSIGN_OR_RETURN(const bool retired, IsRetired(*storage, last.next()));
  if (retired && !deleted) CKPT_RETURN_IF_ERROR(storage->Remove(name));
  if (deleted || retired) return false;
  if (last.live) {
    const Digest before = wanted.replaces.value_or(wanted.manifest);
    (void)PublishText(*storage, DeletedName(last.name), RenderText("manifest", before.Hex()));
  }
  Note(last.next(), wanted);
  Remember({{name, text}});
  return true;
}

// The record if the id was free, holds this very step, or one that it replaces;
// nothing if it is another step's.
Result<std::optional<StepRecord>> Store::State::TryPublish(StepRecord wanted,
                                                           const RenderedStep& rendered,
                                                           const PublishHow& how) {
  for (int race = 0; race < kMaxPublishRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const Incarnation last, LastIncarnation(*storage, wanted.run, wanted.id));
    wanted.replaces.reset();
    if (last.live) {
      auto found = RecordOf(last);
      if (!found && found.error().code == ErrorCode::kNotFound) continue;  // removed meanwhile
      CKPT_ASSIGN_OR_RETURN(auto there, std::move(found));
      const bool whole = there && there->manifest == rendered.manifest;
      // A compacted step needs its source no more, whatever that holds by now.
      const bool may_replace = there && !there->compacted && (how.replace || there->provisional) &&
                               there->source == wanted.source;
      if (IsSame(there, rendered) && (whole || !how.notes || !may_replace)) {
        if (whole) {  // repaired if it was damaged
          CKPT_RETURN_IF_ERROR(PutManifest(rendered.bytes, rendered.manifest));
        }
        Note(last.name, *there);
        if (wanted.provisional || !there->provisional) return there;
        const StepRecord sound = Confirmed(*std::move(there));
        CKPT_ASSIGN_OR_RETURN(const bool done, TryRecord(sound, last));
        if (done) return std::optional(sound);
        continue;
      }
      if (!may_replace) return std::optional<StepRecord>();
      CKPT_ASSIGN_OR_RETURN(const bool kept, IsKeptByTag(*there));
      if (kept && !there->provisional) return std::optional<StepRecord>();
      wanted.replaces = there->manifest;
    }
    CKPT_ASSIGN_OR_RETURN(const auto held, PutHeldManifest(rendered.bytes, rendered.manifest));
    CKPT_ASSIGN_OR_RETURN(const bool done, TryRecord(wanted, last));
    if (done) return std::optional(wanted);
  }
  return Fail(ErrorCode::kExhausted,
              StrCat("step '", wanted.id, "' is being published all the time"));
}

Result<RenderedStep> Store::Render(const StepModel& model, std::optional<Digest> unpacked) const {
  RenderedStep rendered;
  if (unpacked) {
    rendered.unpacked = *unpacked;
  } else {
    CKPT_ASSIGN_OR_RETURN(rendered.unpacked, IdentityDigest(model, state_->Blobs()));
  }
  CKPT_ASSIGN_OR_RETURN(rendered.bytes, RenderManifest(model, state_->Blobs()));
  rendered.manifest = ManifestDigest(rendered.bytes);
  return rendered;
}

Result<std::shared_ptr<const void>> Store::Put(const RenderedStep& rendered) {
  return state_->PutHeldManifest(rendered.bytes, rendered.manifest);
}

Result<PutStep> Store::FindPut(const Digest& manifest) {
  PutStep found;
  found.hold = state_->HoldManifest(manifest);
  CKPT_ASSIGN_OR_RETURN(found.rendered.bytes, ReadWhole(*state_->storage, ManifestName(manifest),
                                                        kManifestHeaderSize + kManifestMaxPayload));
  CKPT_ASSIGN_OR_RETURN(found.model,
                        ParseNamedManifest(found.rendered.bytes, manifest, state_->Blobs()));
  found.rendered.manifest = manifest;
  CKPT_ASSIGN_OR_RETURN(found.rendered.unpacked, IdentityDigest(found.model, state_->Blobs()));
  return found;
}

Result<StepRecord> Store::Publish(std::string_view run, const StepModel& model,
                                  const std::string& source, const std::string& root,
                                  const PublishHow& how) {
  CKPT_ASSIGN_OR_RETURN(const RenderedStep rendered, Render(model));
  return Publish(run, model, rendered, source, root, how);
}

Result<StepRecord> Store::Publish(std::string_view run, const StepModel& model,
                                  const RenderedStep& rendered, const std::string& source,
                                  const std::string& root, const PublishHow& how) {
  return PublishAs(model.id, run, model, rendered, source, root, how);
}

Result<StepRecord> Store::PublishAs(std::string_view id, std::string_view run,
                                    const StepModel& model, const RenderedStep& rendered,
                                    const std::string& source, const std::string& root,
                                    const PublishHow& how) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckStepId(model.id));
  // A step that could not be loaded is never published.
  CKPT_RETURN_IF_ERROR(ParseManifest(rendered.bytes, state_->Blobs()));
  CKPT_RETURN_IF_ERROR(state_->CheckPresent());
  if (how.join) {
    CKPT_ASSIGN_OR_RETURN(const auto claim, LatestClaim(*state_->storage, std::string(run)));
    const bool directory = claim && claim->root.starts_with('/') && claim->root != root;
    if (directory) return PublishAs(id, run, model, rendered, source, claim->root, Alone(how));
  }
  StepRecord wanted = RecordOf(run, model, rendered, source, root);
  wanted.converted = how.converted;
  wanted.life = how.life;
  wanted.provisional = how.provisional;
  CKPT_RETURN_IF_ERROR(state_->ClaimRun(wanted.run, root));
  const int first = id == model.id ? 0 : -1;  // -1: `id` itself
  for (int attempt = first; attempt < kMaxAttempts; ++attempt) {
    wanted.id = attempt < 0 ? std::string(id) : AttemptId(model.id, attempt);
    CKPT_RETURN_IF_ERROR(CheckName(wanted.id, "step"));
    CKPT_ASSIGN_OR_RETURN(const auto published, state_->TryPublish(wanted, rendered, how));
    if (!published) continue;
    CKPT_ASSIGN_OR_RETURN(const auto claim, LatestClaim(*state_->storage, wanted.run));
    if (!claim || claim->root != root) {  // lost the name to a concurrent claim
      CKPT_RETURN_IF_ERROR(Remove(*published));
      return Fail(ErrorCode::kExists, StrCat("run '", run, "' was claimed for another root"));
    }
    return *published;
  }
  return Fail(ErrorCode::kExhausted, StrCat("step '", model.id, "' has 10000 attempts"));
}

Result<std::optional<StepRecord>> Store::FindPublished(std::string_view run, std::string_view id,
                                                       const RenderedStep& rendered) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(id, "step"));
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    CKPT_ASSIGN_OR_RETURN(
        const Incarnation last,
        LastIncarnation(*state_->storage, std::string(run), AttemptId(id, attempt)));
    if (!last.live) break;  // this id is what Publish would take
    auto record = state_->RecordOf(last);
    if (!record && record.error().code == ErrorCode::kNotFound) break;  // removed meanwhile
    if (!record || state_->IsSame(*record, rendered)) return record;
  }
  return std::optional<StepRecord>();
}

Status Store::Confirm(const StepRecord& record) {
  for (int race = 0; race < kMaxPublishRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const Incarnation last,
                          LastIncarnation(*state_->storage, record.run, record.id));
    if (!last.live) return {};
    CKPT_ASSIGN_OR_RETURN(auto there, state_->RecordOf(last));
    if (!there || there->manifest != record.manifest || !there->provisional) return {};
    CKPT_ASSIGN_OR_RETURN(const bool done, state_->TryRecord(Confirmed(*std::move(there)), last));
    if (done) return {};
  }
  return Fail(ErrorCode::kExhausted,
              StrCat("step '", record.id, "' is being published all the time"));
}

Result<StepRecord> Store::Replace(const StepRecord& record, const StepModel& model,
                                  const RenderedStep& rendered) {
  CKPT_CHECK(rendered.unpacked == record.unpacked);
  CKPT_RETURN_IF_ERROR(ParseManifest(rendered.bytes, state_->Blobs()));
  CKPT_RETURN_IF_ERROR(state_->CheckPresent());
  const std::string name = StrCat(record.run, "/", record.id);
  for (int race = 0; race < kMaxPublishRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const Incarnation last,
                          LastIncarnation(*state_->storage, record.run, record.id));
    if (!last.live) return Fail(ErrorCode::kNotFound, StrCat(name, " was removed meanwhile"));
    auto found = state_->RecordOf(last);
    if (!found && found.error().code == ErrorCode::kNotFound) continue;  // removed meanwhile
    CKPT_ASSIGN_OR_RETURN(const auto there, std::move(found));
    if (!there || there->manifest != record.manifest) {
      return Fail(ErrorCode::kStale, StrCat(name, " was replaced by another step meanwhile"));
    }
    CKPT_ASSIGN_OR_RETURN(const auto held,
                          state_->PutHeldManifest(rendered.bytes, rendered.manifest));
    StepRecord wanted = *there;
    wanted.manifest = rendered.manifest;
    wanted.side.reset();
    if (const auto side = FindSideBlob(model)) wanted.side = model.blob(*side).content;
    wanted.replaces = there->manifest;
    wanted.compacted = true;
    CKPT_ASSIGN_OR_RETURN(const bool done, state_->TryRecord(wanted, last));
    if (done) return wanted;
  }
  return Fail(ErrorCode::kExhausted, StrCat(name, " is being published all the time"));
}

Result<std::unique_ptr<StorageWriter>> Store::CreateBlob(std::string_view path) {
  return state_->storage->Create(StrCat("blobs/", path));
}

std::shared_ptr<BlobStream> Store::StreamBlob(const std::string& path, uint64_t size,
                                              std::weak_ptr<const void> owner) {
  auto create = [storage = state_->storage, name = StrCat("blobs/", path)] {
    return storage->Create(name);
  };
  return state_->streams.Begin(path, size, std::move(owner), std::move(create));
}

Status Store::StoreBlob(const Root& bytes, const Blob& blob) {
  const auto store = [&]() -> Status {
    CKPT_ASSIGN_OR_RETURN(StreamedBlob begun, state_->streams.Finish(blob));
    if (!begun.writer) {
      CKPT_ASSIGN_OR_RETURN(begun.writer, CreateBlob(blob.path));
    }
    FaultPoint();
    return CopyOwnedBlob(bytes, blob, *begun.writer, begun.written);
  };
  Status done = store();
  if (done) done = PutChunkList(blob);
  // The space may be that of saves which come after it.
  if (!done && done.error().code == ErrorCode::kExhausted) state_->streams.Clear();
  return done;
}

Status Store::PutChunkList(const Blob& blob) {
  if (blob.chunk_list == Digest{}) return {};
  return ckptfs::PutChunkList(*state_->storage, "blobs", blob);
}

Status Store::PutChunkLists(StepModel& model) {
  const std::string blobs = state_->Blobs();
  std::vector<Status> done(model.blobs.size());
  ParallelFor(model.blobs.size(), [&](size_t i) {
    Blob& blob = model.blobs[i];
    const std::string& root = model.roots[blob.root];
    const bool here = root == blobs || root.starts_with(StrCat(blobs, "/"));
    if (!blob.store_owned || blob.side || !here || !NeedsChunkList(blob)) return;
    blob.chunk_list = DigestOfChunks(blob.chunks);
    const std::string_view below = std::string_view(root).substr(blobs.size());
    done[i] = Caught([&]() -> Status {
      return ckptfs::PutChunkList(*state_->storage, StrCat("blobs", below), blob);
    });
    if (done[i]) blob.chunks = {};
  });
  for (Status& one : done) CKPT_RETURN_IF_ERROR(one);
  return {};
}

Result<SideBlob> Store::PutSideBlob(std::string_view bytes) {
  return ckptfs::PutSideBlob(*state_->storage, state_->directory, bytes);
}

Status Store::Sweep() {
  const KnownRecord known = [this](const StepName& name) { return state_->Known(name); };
  return SweepSideBlobs(*state_->storage, state_->directory, known);
}

// The ones below first: an older record is never the newest.
Status Store::State::Retire(const StepName& name) {
  CKPT_ASSIGN_OR_RETURN(const auto names,
                        ListFilesBelow(*storage, StrCat("steps/", name.run, "/", name.id)));
  for (const std::string& text : names) {
    const auto older = ParseStepName(text, "steps");
    if (!older || older->run != name.run || older->id != name.id || older->n >= name.n) continue;
    const Status renamed = FileStorage::Rename(directory, text, RetiredName(*older));
    if (!renamed && renamed.error().code != ErrorCode::kNotFound) return renamed;
  }
  const auto retire = [&] {
    return FileStorage::Rename(directory, StepRecordName(name), RetiredName(name));
  };
  const Status retired = retire();
  if (retired || retired.error().code != ErrorCode::kExhausted) return retired;
  DropCatalogue(CataloguePath());  // a name may need room as well, where directories are full
  return retire();
}

Status Store::Remove(const StepRecord& record) {
  CKPT_RETURN_IF_ERROR(CheckName(record.run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(record.id, "step"));
  CKPT_ASSIGN_OR_RETURN(const Incarnation last,
                        LastIncarnation(*state_->storage, record.run, record.id));
  const Error gone{ErrorCode::kNotFound,
                   StrCat("no step '", record.id, "' in run '", record.run, "'")};
  if (!last.live) return Fail(gone);
  const auto text = ReadWhole(*state_->storage, StepRecordName(last.name), kRecordMaxBytes);
  const auto there = text ? ParseStepRecord(*text, last.name) : Fail(Error(text.error()));
  // A record that is damaged may be removed by its name.
  if (there && there->manifest != record.manifest) return Fail(gone);
  Status published = PublishText(*state_->storage, DeletedName(last.name),
                                 RenderText("manifest", record.manifest.Hex()));
  if (!published && published.error().code == ErrorCode::kExhausted && !state_->directory.empty()) {
    published = state_->Retire(last.name);
    if (!published && published.error().code == ErrorCode::kNotFound) return Fail(gone);
  }
  if (!published) {
    return published.error().code == ErrorCode::kExists ? Status(Fail(gone)) : published;
  }
  state_->Note(last.name, std::nullopt);
  return {};
}

}  // namespace ckptfs
