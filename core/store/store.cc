// SPDX-License-Identifier: Apache-2.0
#include "core/store/store.h"

#include <algorithm>
#include <random>
#include <tuple>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/blob/file_storage.h"
#include "core/model/side_blob.h"
#include "core/store/catalogue.h"
#include "core/store/manifest_format.h"
#include "core/store/records.h"
#include "core/store/side_blobs.h"
#include "core/store/store_index.h"

namespace ckptfs {
namespace {

constexpr std::string_view kFormatName = "format";
constexpr int kMaxAttempts = 10000;
constexpr int kMaxRaces = 100;

auto StepOrder(const StepRecord& record) {
  return std::tie(record.iteration, record.mtime_ns, record.id);
}

std::string RandomId() {
  std::random_device device;
  Digest id;
  for (uint64_t* half : {&id.high, &id.low}) {
    *half = (uint64_t{device()} << 32) | device();
  }
  return id.Hex();
}

// The identity of the store, made if it has none.
Result<std::string> Identity(Storage& storage, bool create) {
  for (int race = 0; race < 2; ++race) {
    auto text = ReadObject(storage, kFormatName, kRecordMaxBytes);
    if (text) {
      auto id = ParseText(*text, "id");
      if (!id) return Fail(std::move(id).error().WithContext("store"));
      return id;
    }
    if (text.error().code != ErrorCode::kNotFound) return Fail(std::move(text).error());
    if (!create) return Fail(ErrorCode::kNotFound, "there is no store here");
    const std::string rendered = RenderText("id", RandomId());
    const Status published = PublishText(storage, kFormatName, rendered);
    if (!published && published.error().code != ErrorCode::kExists) {
      return Fail(Error(published.error()));
    }
  }
  return Fail(ErrorCode::kInternal, "the store's format record vanished");
}

// The digest of the model's manifest without its side blob.
Result<Digest> UnpackedDigest(const StepModel& model) {
  StepModel unpacked = model;
  DetachSideBlob(unpacked);
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, RenderManifest(unpacked));
  CKPT_ASSIGN_OR_RETURN(const ManifestEnvelope envelope, OpenManifest(bytes));
  return envelope.digest;
}

// "<id>" for attempt 0, else "<id>-<attempt>".
std::string AttemptId(const std::string& id, int attempt) {
  return attempt == 0 ? id : StrCat(id, "-", attempt);
}

}  // namespace

struct Store::State {
  std::shared_ptr<Storage> storage;
  std::string directory;  // empty: not on local disk
  std::string identity;

  Mutex mutex;
  std::shared_ptr<const StoreIndex> index GUARDED_BY(mutex) = std::make_shared<StoreIndex>();
  uint64_t tickets GUARDED_BY(mutex) = 0;    // refreshes begun
  uint64_t installed GUARDED_BY(mutex) = 0;  // the ticket that `index` is of
  std::map<std::string, std::weak_ptr<const Step>> loaded GUARDED_BY(mutex);  // by record name

  std::shared_ptr<const StoreIndex> Index() {
    MutexLock lock(mutex);
    return index;
  }
  std::string CataloguePath() const { return directory + "/catalogue.sqlite"; }

  Status CheckPresent();
  Status PutManifest(const std::string& bytes, const Digest& digest);
  Status ClaimRun(const std::string& run, const std::string& root);
  Status CheckOthers(const std::string& run, const std::string& root);
  Result<std::optional<StepRecord>> IfSame(const Incarnation& live, const Digest& unpacked);
  Result<std::optional<StepRecord>> TryPublish(const StepRecord& wanted);
  Result<std::string> ReadManifest(const Digest& digest);
};

Store::Store(std::unique_ptr<State> state) : state_(std::move(state)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::Open(const std::string& directory, bool create) {
  auto storage = FileStorage::Open(directory, create);
  if (!storage) return Fail(std::move(storage).error().WithContext(StrCat("store ", directory)));
  auto state = std::make_unique<State>();
  state->directory = (*storage)->directory();
  state->storage = *std::move(storage);
  auto id = Identity(*state->storage, create);
  if (!id) return Fail(std::move(id).error().WithContext(directory));
  state->identity = *id;
  auto index = std::make_shared<StoreIndex>();
  index->texts = LoadCatalogue(state->CataloguePath(), state->identity);
  {
    MutexLock lock(state->mutex);
    state->index = index;
  }
  std::unique_ptr<Store> store(new Store(std::move(state)));
  CKPT_RETURN_IF_ERROR(store->Refresh());
  return store;
}

Result<std::unique_ptr<Store>> Store::OpenOn(std::shared_ptr<Storage> storage) {
  auto state = std::make_unique<State>();
  state->storage = std::move(storage);
  CKPT_ASSIGN_OR_RETURN(state->identity, Identity(*state->storage, true));
  std::unique_ptr<Store> store(new Store(std::move(state)));
  CKPT_RETURN_IF_ERROR(store->Refresh());
  return store;
}

const std::string& Store::directory() const { return state_->directory; }

// That what lies here is the store that was opened.  One that is away (an
// automounter, a server that does not answer) is an empty directory, which says
// nothing about its steps.
Status Store::State::CheckPresent() {
  const auto now = Identity(*storage, false);
  if (now && *now == identity) return {};
  if (now) {
    return Fail(ErrorCode::kIo, StrCat("another store lies at ", directory,
                                       " now; what is known of the one before stays"));
  }
  return Fail(ErrorCode::kIo, StrCat("store ", directory, " is away (", now.error().message,
                                     "); what is known of it stays"));
}

Status Store::Refresh() {
  std::shared_ptr<const StoreIndex> known;
  uint64_t ticket = 0;
  {
    MutexLock lock(state_->mutex);
    ticket = ++state_->tickets;
    known = state_->index;
  }
  RecordTexts added;
  CKPT_RETURN_IF_ERROR(state_->CheckPresent());
  CKPT_ASSIGN_OR_RETURN(StoreIndex fresh, BuildStoreIndex(*state_->storage, *known, added));
  CKPT_RETURN_IF_ERROR(state_->CheckPresent());  // all the time, that is
  if (!added.empty() && !state_->directory.empty()) {
    AddToCatalogue(state_->CataloguePath(), state_->identity, added);
  }
  auto shared = std::make_shared<const StoreIndex>(std::move(fresh));
  MutexLock lock(state_->mutex);
  if (ticket > state_->installed) {  // else a refresh that began later has finished
    state_->index = std::move(shared);
    state_->installed = ticket;
  }
  return {};
}

Result<std::vector<std::string>> Store::Runs() {
  std::vector<std::string> runs;
  for (const auto& [run, steps] : state_->Index()->runs) runs.push_back(run);
  return runs;
}

Result<std::vector<StepRecord>> Store::Steps(std::string_view run) {
  const auto index = state_->Index();
  const auto found = index->runs.find(std::string(run));
  if (found == index->runs.end()) {
    return Fail(ErrorCode::kNotFound, StrCat("no run '", run, "'"));
  }
  std::vector<StepRecord> records;
  for (const auto& [id, step] : found->second) {
    if (step.record) records.push_back(*step.record);
  }
  std::sort(records.begin(), records.end(), [](const StepRecord& a, const StepRecord& b) {
    return StepOrder(a) < StepOrder(b);
  });
  return records;
}

Result<StepRecord> Store::Resolve(std::string_view run, std::string_view id) {
  const auto index = state_->Index();
  const auto found = index->runs.find(std::string(run));
  if (found == index->runs.end()) {
    return Fail(ErrorCode::kNotFound, StrCat("no run '", run, "'"));
  }
  const auto& steps = found->second;
  if (id != "latest") {
    const auto step = steps.find(std::string(id));
    if (step == steps.end()) {
      return Fail(ErrorCode::kNotFound, StrCat("no step '", id, "' in run '", run, "'"));
    }
    if (!step->second.record) return Fail(Error(step->second.record.error()));
    return *step->second.record;
  }
  const StepRecord* latest = nullptr;
  for (const auto& [name, step] : steps) {
    if (!step.record) {
      return Fail(Error(step.record.error()).WithContext(StrCat("latest of '", run, "'")));
    }
    if (latest == nullptr || StepOrder(*latest) < StepOrder(*step.record)) latest = &*step.record;
  }
  CKPT_CHECK(latest != nullptr);  // a run without steps is not in the index
  return *latest;
}

// ---- publishing --------------------------------------------------------------

Status Store::State::PutManifest(const std::string& bytes, const Digest& digest) {
  const std::string name = ManifestName(digest);
  Status published = PublishText(*storage, name, bytes);
  if (published || published.error().code != ErrorCode::kExists) return published;
  const auto there = ReadObject(*storage, name, bytes.size());
  if (there && *there == bytes) return {};
  // Damaged since it was published: its name says what it has to hold.
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage->Create(name));
  CKPT_RETURN_IF_ERROR(writer->Append(std::as_bytes(std::span(bytes))));
  return writer->Close();
}

// That no step of another root is in the run.
Status Store::State::CheckOthers(const std::string& run, const std::string& root) {
  RecordTexts unused;
  CKPT_ASSIGN_OR_RETURN(const StoreIndex fresh, BuildStoreIndex(*storage, *Index(), unused));
  const auto found = fresh.runs.find(run);
  if (found == fresh.runs.end()) return {};
  for (const auto& [id, step] : found->second) {
    if (!step.record) return Fail(Error(step.record.error()));
    if (step.record->root == root) continue;
    return Fail(ErrorCode::kExists,
                StrCat("run '", run, "' belongs to ", step.record->root,
                       "; adopt under another name (--name)"));
  }
  return {};
}

Status Store::State::ClaimRun(const std::string& run, const std::string& root) {
  for (int race = 0; race < kMaxRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const auto claim, LatestClaim(*storage, run));
    if (claim && claim->root == root) return CheckOthers(run, root);
    if (claim) CKPT_RETURN_IF_ERROR(CheckOthers(run, root));
    const std::string name = StrCat("runs/", run, "/", claim ? claim->n + 1 : 0);
    Status published = PublishText(*storage, name, RenderText("root", root));
    if (published) return CheckOthers(run, root);
    if (published.error().code != ErrorCode::kExists) return published;
  }
  return Fail(ErrorCode::kExhausted, StrCat("run '", run, "' is being claimed all the time"));
}

// The record of a live step if it is the one of this digest.
Result<std::optional<StepRecord>> Store::State::IfSame(const Incarnation& live,
                                                       const Digest& unpacked) {
  CKPT_ASSIGN_OR_RETURN(const std::string text,
                        ReadObject(*storage, StepRecordName(live.name), kRecordMaxBytes));
  auto record = ParseStepRecord(text, live.name);
  if (!record || record->unpacked != unpacked) return std::optional<StepRecord>();
  return std::optional(*std::move(record));
}

// The record if the id was free or holds this very step; nothing if it is
// another step's.
Result<std::optional<StepRecord>> Store::State::TryPublish(const StepRecord& wanted) {
  for (int race = 0; race < kMaxRaces; ++race) {
    CKPT_ASSIGN_OR_RETURN(const Incarnation last, LastIncarnation(*storage, wanted.run, wanted.id));
    if (last.live) return IfSame(last, wanted.unpacked);
    const Status published =
        PublishText(*storage, StepRecordName(last.next()), RenderStepRecord(wanted));
    if (published) return std::optional(wanted);
    if (published.error().code != ErrorCode::kExists) return Fail(Error(published.error()));
  }
  return Fail(ErrorCode::kExhausted, StrCat("step '", wanted.id, "' is being published all the time"));
}

Result<StepRecord> Store::Publish(std::string_view run, const StepModel& model,
                                  const std::string& source, const std::string& root) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(model.id, "step"));
  if (model.id == "latest") return Fail(ErrorCode::kInvalid, "step name: 'latest' is taken");
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, RenderManifest(model));
  // What could not be loaded is never published.
  CKPT_RETURN_IF_ERROR(ParseManifest(bytes));
  CKPT_ASSIGN_OR_RETURN(const ManifestEnvelope envelope, OpenManifest(bytes));
  StepRecord wanted{std::string(run), model.id, envelope.digest, model.iteration,
                    model.mtime_ns,   source,   root,            {},
                    envelope.digest};
  if (const auto side = FindSideBlob(model)) {
    wanted.side = model.blob(*side).content;
    CKPT_ASSIGN_OR_RETURN(wanted.unpacked, UnpackedDigest(model));
  }
  CKPT_RETURN_IF_ERROR(state_->ClaimRun(wanted.run, root));
  CKPT_RETURN_IF_ERROR(state_->PutManifest(bytes, wanted.manifest));
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    wanted.id = AttemptId(model.id, attempt);
    CKPT_RETURN_IF_ERROR(CheckName(wanted.id, "step"));
    CKPT_ASSIGN_OR_RETURN(const auto published, state_->TryPublish(wanted));
    if (!published) continue;
    CKPT_ASSIGN_OR_RETURN(const auto claim, LatestClaim(*state_->storage, wanted.run));
    if (!claim || claim->root != root) {  // lost the name to a concurrent claim
      CKPT_RETURN_IF_ERROR(Remove(*published));
      return Fail(ErrorCode::kExists, StrCat("run '", run, "' was claimed for another root"));
    }
    CKPT_RETURN_IF_ERROR(Refresh());
    return *published;
  }
  return Fail(ErrorCode::kExhausted, StrCat("step '", model.id, "' has 10000 attempts"));
}

Result<std::optional<StepRecord>> Store::FindPublished(std::string_view run,
                                                       const StepModel& model) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(model.id, "step"));
  CKPT_ASSIGN_OR_RETURN(const Digest unpacked, UnpackedDigest(model));
  for (int attempt = 0; attempt < kMaxAttempts; ++attempt) {
    CKPT_ASSIGN_OR_RETURN(const Incarnation last,
                          LastIncarnation(*state_->storage, std::string(run),
                                          AttemptId(model.id, attempt)));
    if (!last.live) break;  // this id is what Publish would take
    CKPT_ASSIGN_OR_RETURN(auto record, state_->IfSame(last, unpacked));
    if (record) return record;
  }
  return std::optional<StepRecord>();
}

Result<SideBlob> Store::PutSideBlob(std::string_view bytes) {
  return ckptfs::PutSideBlob(*state_->storage, state_->directory, bytes);
}

Status Store::Sweep() { return SweepSideBlobs(*state_->storage, state_->directory); }

Status Store::Remove(const StepRecord& record) {
  CKPT_RETURN_IF_ERROR(CheckName(record.run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(record.id, "step"));
  CKPT_ASSIGN_OR_RETURN(const Incarnation last,
                        LastIncarnation(*state_->storage, record.run, record.id));
  const Error gone{ErrorCode::kNotFound,
                   StrCat("no step '", record.id, "' in run '", record.run, "'")};
  if (!last.live) return Fail(gone);
  const auto text = ReadObject(*state_->storage, StepRecordName(last.name), kRecordMaxBytes);
  const auto there = text ? ParseStepRecord(*text, last.name) : Fail(Error(text.error()));
  // A record that is damaged may be removed by its name.
  if (there && there->manifest != record.manifest) return Fail(gone);
  const Status published = PublishText(*state_->storage, DeletedName(last.name),
                                       RenderText("manifest", record.manifest.Hex()));
  if (!published) {
    return published.error().code == ErrorCode::kExists ? Status(Fail(gone)) : published;
  }
  return Refresh();
}

// ---- loading -----------------------------------------------------------------

Result<std::string> Store::State::ReadManifest(const Digest& digest) {
  return ReadObject(*storage, ManifestName(digest), kManifestHeaderSize + kManifestMaxPayload);
}

Result<std::shared_ptr<const Step>> Store::Load(const StepRecord& record) {
  const std::string key = StrCat(record.run, "/", record.id, "/", record.manifest.Hex());
  {
    MutexLock lock(state_->mutex);
    const auto found = state_->loaded.find(key);
    if (found != state_->loaded.end()) {
      if (auto step = found->second.lock()) return step;
    }
  }
  auto step = std::make_shared<Step>();
  step->record = record;
  CKPT_ASSIGN_OR_RETURN(const std::string bytes, state_->ReadManifest(record.manifest));
  Result<StepModel> model = ParseNamedManifest(bytes, record.manifest);
  if (!model) return Fail(std::move(model).error().WithContext(StrCat(record.run, "/", record.id)));
  step->model = *std::move(model);
  step->hold = HoldSideBlob(state_->directory, step->model);
  std::shared_ptr<const Step> loaded = std::move(step);
  MutexLock lock(state_->mutex);
  std::weak_ptr<const Step>& slot = state_->loaded[key];
  if (auto other = slot.lock()) return other;  // somebody was faster: share theirs
  slot = loaded;
  std::erase_if(state_->loaded, [](const auto& entry) { return entry.second.expired(); });
  return loaded;
}

}  // namespace ckptfs
