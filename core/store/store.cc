// SPDX-License-Identifier: Apache-2.0
#include "core/store/store.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "core/base/strings.h"
#include "core/io/file_storage.h"
#include "core/manifest/manifest_format.h"
#include "core/records/records.h"
#include "core/store/catalogue.h"
#include "core/store/lives.h"
#include "core/store/side_blobs.h"
#include "core/store/store_index.h"
#include "core/store/store_state.h"

namespace ckptfs {
namespace {

constexpr std::string_view kFormatName = "format";

// The entries of a store, and those of one that was not made to the end.
constexpr auto kStoreNames = std::to_array<std::string_view>(
    {".tmp", "blobs", "deleted", "format", "holds", "log", "lost+found", "manifests", "nodes",
     "prepared", "runs", "steps"});

// Nothing is written into a directory that is something else: a checkpoint given
// for a store, say.
Status CheckMayBeStore(const std::string& directory) {
  std::error_code error;
  const std::filesystem::path path = directory;
  if (std::filesystem::exists(path / kFormatName, error)) return {};
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with("catalogue.sqlite") ||
                      std::find(kStoreNames.begin(), kStoreNames.end(), name) != kStoreNames.end();
    if (ours) continue;
    return Fail(ErrorCode::kInvalid,
                StrCat(directory, " is not a store, and it is not empty (", name,
                       "); if it is a checkpoint, do you mean --adopt ", directory, "?"));
  }
  return {};
}

// The identity of the store, made if it has none.
Result<std::string> Identity(Storage& storage, bool create) {
  for (int race = 0; race < 2; ++race) {
    auto text = ReadWhole(storage, kFormatName, kRecordMaxBytes);
    if (text) {
      auto id = ParseText(*text, "id");
      if (!id) return Fail(std::move(id).error().WithContext("store"));
      return id;
    }
    if (text.error().code != ErrorCode::kNotFound) return Fail(std::move(text).error());
    if (!create) return Fail(ErrorCode::kNotFound, "there is no store here");
    const std::string rendered = RenderText("id", RandomDigest().Hex());
    const Status published = PublishText(storage, kFormatName, rendered);
    if (!published && published.error().code != ErrorCode::kExists) {
      return Fail(Error(published.error()));
    }
  }
  return Fail(ErrorCode::kInternal, "the store's format record vanished");
}

}  // namespace

Store::Store(std::unique_ptr<State> state) : state_(std::move(state)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::Open(const std::string& directory, bool create) {
  CKPT_RETURN_IF_ERROR(CheckMayBeStore(directory));
  auto storage = FileStorage::Open(directory, create);
  if (!storage) return Fail(std::move(storage).error().WithContext(StrCat("store ", directory)));
  const std::string absolute = (*storage)->directory();
  auto store = OpenOn(*std::move(storage), create, absolute);
  if (!store) return Fail(std::move(store).error().WithContext(directory));
  return store;
}

Result<std::unique_ptr<Store>> Store::OpenOn(std::shared_ptr<Storage> storage, bool create,
                                             std::string directory) {
  auto state = std::make_unique<State>();
  state->storage = std::move(storage);
  state->directory = std::move(directory);
  CKPT_ASSIGN_OR_RETURN(state->identity, Identity(*state->storage, create));
  return std::unique_ptr<Store>(new Store(std::move(state)));
}

const std::string& Store::directory() const { return state_->directory; }

const std::shared_ptr<Storage>& Store::storage() const { return state_->storage; }

PresenceWatch& Store::presences() { return state_->presences; }

std::string Store::blobs() const { return state_->Blobs(); }

std::string Store::State::Blobs() const { return BlobsDirectory(directory); }

// ---- the index ---------------------------------------------------------------

std::optional<StepRecord> Store::State::Known(const StepName& name) {
  MutexLock lock(mutex);
  const IndexedStep* step = index.Find(name.run, name.id);
  if (step == nullptr || step->name.n != name.n || !step->record) return std::nullopt;
  return *step->record;
}

void Store::State::Remember(const RecordTexts& added) const {
  if (!added.empty() && !directory.empty()) AddToCatalogue(CataloguePath(), identity, added);
}

bool Store::State::Apply(const LocalChange& change, StoreIndex& to) const {
  if (change.record) return to.Put(IndexedStep{change.name, *change.record});
  return to.Drop(change.name);
}

void Store::State::Note(const StepName& name, std::optional<Result<StepRecord>> record) {
  MutexLock lock(mutex);
  LocalChange change{++tickets, name, std::move(record)};
  if (installed != 0 && Apply(change, index)) {
    StepChange told{name.run, name.id, {}};
    if (change.record && *change.record) told.record = **change.record;
    changes.Add(std::move(told));
  }
  if (refreshing > 0) local.push_back(std::move(change));
}

void Store::State::Install(StoreIndex fresh, uint64_t ticket) {
  for (const LocalChange& change : local) {
    if (change.ticket > ticket) Apply(change, fresh);  // the refresh may have missed it
  }
  const bool first = installed == 0;
  installed = ticket;
  std::swap(index, fresh);
  if (first) return;  // nobody has been told anything yet
  const StoreIndex& before = fresh;
  for (const auto& [run, steps] : before.runs) {
    for (const auto& [id, step] : steps) {
      if (index.Find(run, id) == nullptr) changes.Add({run, id, {}});
    }
  }
  for (const auto& [run, steps] : index.runs) {
    for (const auto& [id, step] : steps) {
      const IndexedStep* was = before.Find(run, id);
      if (was != nullptr && was->name.n == step.name.n) continue;
      changes.Add({run, id, step.record ? std::optional(*step.record) : std::nullopt});
    }
  }
}

// Checks that the directory still holds the store that was opened.  A store that is
// away (an automounter, a server that does not answer) is an empty directory, which
// says nothing about its steps.
Status Store::State::CheckPresent() {
  const auto now = Identity(*storage, false);
  if (now && *now == identity) return {};
  if (now) {
    return Fail(ErrorCode::kIo, StrCat("another store lies at ", directory,
                                       " now; ckptfs keeps what it knows of the former store"));
  }
  return Fail(ErrorCode::kIo, StrCat("store ", directory,
                                     " cannot be "
                                     "reached (",
                                     now.error().message, "); ckptfs keeps what it knows of it"));
}

Status Store::State::BuildIndex() {
  uint64_t ticket = 0;
  bool first = false;
  {
    MutexLock lock(mutex);
    ticket = ++tickets;
    first = installed == 0;
    ++refreshing;
  }
  RecordTexts texts;  // of records that other processes read before us
  if (first && !directory.empty()) texts = LoadCatalogue(CataloguePath(), identity);
  const KnownRecord known = [&](const StepName& name) -> std::optional<StepRecord> {
    if (auto record = Known(name)) return record;
    const auto text = texts.find(StepRecordName(name));
    if (text == texts.end()) return std::nullopt;
    auto record = ParseStepRecord(text->second, name);
    return record ? std::optional(*std::move(record)) : std::nullopt;
  };
  RecordTexts added;
  const auto look = [&]() -> Result<StoreIndex> {
    CKPT_RETURN_IF_ERROR(CheckPresent());
    CKPT_ASSIGN_OR_RETURN(StoreIndex seen, BuildStoreIndex(*storage, "", known, added));
    CKPT_RETURN_IF_ERROR(CheckPresent());  // all the time, that is
    return seen;
  };
  auto fresh = look();
  if (fresh) Remember(added);
  MutexLock lock(mutex);
  // Unless a refresh that began later has finished.
  if (fresh && ticket > installed) Install(std::move(*fresh), ticket);
  if (--refreshing == 0) local.clear();
  if (!fresh) return Fail(std::move(fresh).error());
  return {};
}

Status Store::State::NeedIndex() {
  {
    MutexLock lock(mutex);
    if (installed != 0) return {};
  }
  return BuildIndex();
}

Status Store::Refresh() { return state_->BuildIndex(); }

Status Store::RefreshStep(std::string_view run, std::string_view id) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  CKPT_RETURN_IF_ERROR(CheckName(id, "step"));
  State& s = *state_;
  CKPT_RETURN_IF_ERROR(s.CheckPresent());
  CKPT_ASSIGN_OR_RETURN(const Incarnation last,
                        LastIncarnation(*s.storage, std::string(run), std::string(id)));
  if (!last.any) return {};
  if (!last.live) {
    s.Note(last.name, std::nullopt);
    return {};
  }
  RecordTexts added;
  const KnownRecord known = [&s](const StepName& name) { return s.Known(name); };
  CKPT_ASSIGN_OR_RETURN(auto step, ReadStep(*s.storage, last.name, known, added));
  s.Note(last.name, step ? std::optional(std::move(step->record)) : std::nullopt);
  s.Remember(added);
  return {};
}

Result<StepNews> Store::News(uint64_t generation) {
  CKPT_RETURN_IF_ERROR(state_->NeedIndex());
  StepNews news;
  MutexLock lock(state_->mutex);
  news.generation = state_->changes.generation();
  if (auto since = state_->changes.Since(generation)) {
    news.changes = *std::move(since);
    return news;
  }
  news.all = true;
  for (const auto& [run, steps] : state_->index.runs) {
    for (const auto& [id, step] : steps) {
      if (step.record) news.changes.push_back({run, id, *step.record});
    }
  }
  return news;
}

// ---- questions ---------------------------------------------------------------

namespace {

Error NoRun(std::string_view run) {
  return Error{ErrorCode::kNotFound, StrCat("no run '", run, "'")};
}

}  // namespace

Result<std::vector<std::string>> Store::Runs() {
  CKPT_RETURN_IF_ERROR(state_->NeedIndex());
  std::vector<std::string> runs;
  MutexLock lock(state_->mutex);
  for (const auto& [run, steps] : state_->index.runs) runs.push_back(run);
  return runs;
}

Result<std::vector<StepRecord>> Store::Steps(std::string_view run) {
  CKPT_RETURN_IF_ERROR(state_->NeedIndex());
  std::vector<StepRecord> records;
  {
    MutexLock lock(state_->mutex);
    const auto found = state_->index.runs.find(std::string(run));
    if (found == state_->index.runs.end()) return Fail(NoRun(run));
    for (const auto& [id, step] : found->second) {
      if (step.record) records.push_back(*step.record);
    }
  }
  std::sort(records.begin(), records.end(), IsOlder);
  return records;
}

Result<std::optional<StepRecord>> Store::State::FindStep(std::string_view run,
                                                         std::string_view id) {
  MutexLock lock(mutex);
  const auto found = index.runs.find(std::string(run));
  if (found == index.runs.end()) return Fail(NoRun(run));
  const auto step = found->second.find(std::string(id));
  if (step == found->second.end()) return std::optional<StepRecord>();
  if (!step->second.record) return Fail(Error(step->second.record.error()));
  return std::optional(*step->second.record);
}

Result<StepRecord> Store::Resolve(std::string_view run, std::string_view id) {
  CKPT_RETURN_IF_ERROR(state_->NeedIndex());
  if (id != "latest") {
    CKPT_ASSIGN_OR_RETURN(auto step, state_->FindStep(run, id));
    if (step) return *std::move(step);
    return state_->ResolveTag(run, id);
  }
  MutexLock lock(state_->mutex);
  const auto found = state_->index.runs.find(std::string(run));
  if (found == state_->index.runs.end()) return Fail(NoRun(run));
  const StepRecord* latest = nullptr;
  for (const auto& [name, step] : found->second) {
    if (!step.record) {
      return Fail(Error(step.record.error()).WithContext(StrCat("latest of '", run, "'")));
    }
    if (latest == nullptr || IsOlder(*latest, *step.record)) latest = &*step.record;
  }
  CKPT_CHECK(latest != nullptr);  // a run without steps is not in the index
  return *latest;
}

int64_t Store::SaveTimeOf(const std::string& run, const std::string& job, int64_t time) {
  State& s = *state_;
  bool known = false;
  {
    MutexLock lock(s.mutex);
    std::string& last = s.saving[run];
    known = s.installed != 0 && last == job;
    last = job;
  }
  // A store that is away says nothing new; the save waits for it by itself.
  if (!known) (void)s.BuildIndex();
  MutexLock lock(s.mutex);
  const auto found = s.index.runs.find(run);
  if (found == s.index.runs.end()) return time;
  for (const auto& [id, step] : found->second) {
    if (step.record) time = std::max(time, step.record->mtime_ns + 1);
  }
  return time;
}

// ---- loading -----------------------------------------------------------------

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
  auto held = state_->HoldManifest(record.manifest);
  CKPT_ASSIGN_OR_RETURN(const WholeFile file,
                        WholeFile::Open(*state_->storage, ManifestName(record.manifest),
                                        kManifestHeaderSize + kManifestMaxPayload));
  Result<StepModel> model = ParseNamedManifest(
      file.text(), record.manifest, state_->directory.empty() ? std::string() : state_->Blobs());
  if (!model) return Fail(std::move(model).error().WithContext(StrCat(record.run, "/", record.id)));
  ResolvedModel resolved = ResolveSideBlob(state_->directory, *std::move(model));
  step->model = std::move(resolved.model);
  using Holds = std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>;
  step->hold = std::make_shared<const Holds>(std::move(held), std::move(resolved.hold));
  std::shared_ptr<const Step> loaded = std::move(step);
  MutexLock lock(state_->mutex);
  std::weak_ptr<const Step>& slot = state_->loaded[key];
  if (auto other = slot.lock()) return other;  // somebody was faster: share theirs
  slot = loaded;
  std::erase_if(state_->loaded, [](const auto& entry) { return entry.second.expired(); });
  return loaded;
}

Status CheckStepId(std::string_view id) {
  CKPT_RETURN_IF_ERROR(CheckName(id, "step"));
  if (id != "latest") return {};
  return Fail(ErrorCode::kInvalid, "step name: 'latest' is taken");
}

}  // namespace ckptfs
