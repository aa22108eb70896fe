// SPDX-License-Identifier: Apache-2.0
#include "core/commit/world_commit.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/commit/flat_records.h"
#include "core/io/file_stamp.h"
#include "core/records/records.h"
#include "core/store/lives.h"
#include "core/store/store_index.h"

namespace ckptfs {
namespace {

using Kind = CommitName::Kind;
using State = AttemptNews::State;

constexpr std::chrono::minutes kOutcomeStays{10};  // for daemons that have no part yet

bool HasRank(const std::vector<PreparedRank>& ranks, const PreparedRank& one) {
  return std::ranges::any_of(ranks, [&](const PreparedRank& its) { return its.IsSameAs(one); });
}

bool IsThere(const Status& published) {
  return !published && published.error().code == ErrorCode::kExists;
}

}  // namespace

struct WorldCommit::Names {
  std::vector<std::string> parts;
  bool outcome = false;
  bool done = false;
};

WorldCommit::WorldCommit(Store& store, ModelOf model_of, std::chrono::milliseconds beat)
    : store_(store),
      model_of_(std::move(model_of)),
      said_(store.storage(), store.directory(), beat) {}

WorldCommit::~WorldCommit() {
  while (!joined_.empty()) {
    const Job job = joined_.begin()->first;
    Leave(job.first, job.second);
  }
}

Result<bool> WorldCommit::HasGone(const Digest& other) {
  CKPT_ASSIGN_OR_RETURN(const auto said, ReadPresence(*store_.storage(), other));
  return store_.presences().Look(store_.directory(), other, said, Clock::now()) ==
         PresenceState::kGone;
}

// ---- parts ---------------------------------------------------------------------

Result<WorldCommit::Names> WorldCommit::NamesOf(const AttemptName& name) const {
  CKPT_ASSIGN_OR_RETURN(const auto paths, ListFilesBelow(*store_.storage(), AttemptFolder(name)));
  Names names;
  for (const std::string& path : paths) {
    const auto parsed = ParseCommitName(path);
    if (!parsed) continue;
    if (parsed->kind == Kind::kPart) names.parts.push_back(path);
    names.outcome = names.outcome || parsed->kind == Kind::kOutcome;
    names.done = names.done || parsed->kind == Kind::kDone;
  }
  return names;
}

// Null if it has gone.
Result<const PreparedPart*> WorldCommit::PartAt(const std::string& path) {
  const auto known = parts_.find(path);
  if (known != parts_.end()) return &known->second;
  const auto text = ReadWhole(*store_.storage(), path, kPreparedMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return nullptr;
  if (!text) return Fail(Error(text.error()));
  auto part = ParsePart(*text, *ParseCommitName(path));
  if (!part) return Fail(std::move(part).error().WithContext(path));
  return &parts_.emplace(path, *std::move(part)).first->second;
}

// By rank.  kInvalid if they are not of one step and world, or hold a rank twice that is not
// the same.
Result<std::map<uint32_t, const PreparedPart*>> WorldCommit::PartsOf(const Names& names) {
  std::map<uint32_t, const PreparedPart*> by_rank;
  const PreparedPart* first = nullptr;
  for (const std::string& path : names.parts) {
    CKPT_ASSIGN_OR_RETURN(const PreparedPart* const part, PartAt(path));
    if (part == nullptr) continue;
    if (first == nullptr) first = part;
    if (part->step != first->step || part->world != first->world) {
      return Refuse("its parts disagree: step ", first->step, " of ", first->world, " ranks, step ",
                    part->step, " of ", part->world);
    }
    for (const PreparedRank& rank : part->ranks) {
      const auto [at, added] = by_rank.emplace(rank.rank, part);
      const auto& ranks = at->second->ranks;
      if (!added && !HasRank(ranks, rank)) {
        return Refuse("rank ", rank.rank, " handed over two parts");
      }
    }
  }
  return by_rank;
}

// A rank's file that is there may be another daemon's: then the parts are read.  Another part of
// the same rank that has no such file is found by who publishes, who reads all of them.
Result<WorldCommit::Prepared> WorldCommit::WhatIsPrepared(PreparedPart& part) {
  const Storage& storage = *store_.storage();
  for (const std::string& path : {OutcomeName(part.name), PartName(part, node())}) {
    CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(storage, path));
    if (there) return Prepared::kAll;
  }
  bool written = false;
  for (const PreparedRank& rank : part.ranks) {
    if (written) break;
    CKPT_ASSIGN_OR_RETURN(written, HasFile(storage, StrCat("blobs/", part.PathOf(rank.rank))));
  }
  if (!written) return Prepared::kNothing;
  CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(part.name));
  CKPT_ASSIGN_OR_RETURN(const auto by_rank, PartsOf(names));
  uint64_t same = 0;
  for (const PreparedRank& rank : part.ranks) {
    const auto found = by_rank.find(rank.rank);
    if (found == by_rank.end()) continue;
    const auto& ranks = found->second->ranks;
    if (!HasRank(ranks, rank)) {
      return Fail(ErrorCode::kExists, StrCat("rank ", rank.rank, " handed over two parts"));
    }
    part.mtime_ns = found->second->mtime_ns;
    ++same;
  }
  if (same == 0) return Prepared::kNothing;
  if (same == part.ranks.size()) return Prepared::kFiles;
  return Fail(ErrorCode::kExists, "another daemon already has a part of this save");
}

Status WorldCommit::Prepare(PreparedPart part, const Root& bytes) {
  part = part.WithChunkLists();
  CKPT_ASSIGN_OR_RETURN(const Prepared there, WhatIsPrepared(part));
  const std::string path = PartName(part, node());
  if (there == Prepared::kAll) return {};
  // Until the record names it.
  CKPT_ASSIGN_OR_RETURN(const auto said, said_.Hold(StrCat("blobs/", part.Directory())));
  CKPT_ASSIGN_OR_RETURN(const auto held, store_.HoldBlobs(part.PathOf(0)));
  if (there == Prepared::kNothing) {
    for (const PreparedRank& rank : part.ranks) {
      CKPT_RETURN_IF_ERROR(store_.StoreBlob(bytes, FileOf(part, rank)));
      FaultPoint();
    }
    part.mtime_ns = store_.SaveTimeOf(part.name.run, part.name.job, NowNs());
  }
  // An older build's files have no lists.
  for (const PreparedRank& rank : part.ranks) {
    if (there == Prepared::kFiles) CKPT_RETURN_IF_ERROR(store_.PutChunkList(FileOf(part, rank)));
  }
  ours_[part.name].insert(path);  // also if it is there in spite of an error
  const Status published = PublishText(*store_.storage(), path, RenderPart(part));
  FaultPoint();
  return IsThere(published) ? Status() : published;  // an earlier try's
}

void WorldCommit::Withdraw(const AttemptName& name) {
  ForgetPart(name);
  if (!ForgetDone(name)) published_.insert(name);
}

// ---- what becomes of an attempt ------------------------------------------------

struct WorldCommit::Later {
  std::set<uint32_t> ranks;
  std::map<uint64_t, uint64_t> steps;  // by attempt
};

// A daemon prepares the saves of a rank in order, so what is not there of a rank that has a part in
// a later one never comes.
Result<WorldCommit::Later> WorldCommit::SavesAfter(const AttemptName& name) {
  Later later;
  const auto attempts = store_.storage()->List(LifeFolder(name));
  if (!attempts && attempts.error().code == ErrorCode::kNotFound) return later;
  if (!attempts) return Fail(Error(attempts.error()));
  const Digest job = ParseCommitName(OutcomeName(name))->job;
  for (const RootEntry& entry : *attempts) {
    // Not larger than a part of it would be.
    const auto other = ParseCommitName(StrCat(LifeFolder(name), "/", entry.name, "/outcome"));
    if (!other || other->job != job || other->attempt <= name.attempt) continue;
    AttemptName after = name;
    after.attempt = other->attempt;
    CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(after));
    for (const std::string& path : names.parts) {
      CKPT_ASSIGN_OR_RETURN(const PreparedPart* const part, PartAt(path));
      if (part == nullptr) continue;
      later.steps.emplace(after.attempt, part->step);
      for (const PreparedRank& rank : part->ranks) later.ranks.insert(rank.rank);
    }
  }
  return later;
}

Result<std::optional<AttemptNews>> WorldCommit::Glance(const AttemptName& name) {
  CKPT_ASSIGN_OR_RETURN(const bool done, HasFile(*store_.storage(), DoneName(name)));
  if (done) return Done(name);
  const auto text = ReadWhole(*store_.storage(), OutcomeName(name), kRecordMaxBytes);
  if (!text && text.error().code == ErrorCode::kNotFound) return std::nullopt;
  if (!text) return Fail(Error(text.error()));
  CKPT_ASSIGN_OR_RETURN(const AttemptOutcome outcome,
                        ParseOutcome(*text, *ParseCommitName(OutcomeName(name))));
  if (outcome.manifest) return std::nullopt;
  return Dropped(outcome);
}

Result<bool> WorldCommit::IsOurTurn(const AttemptName& name) {
  CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(name));
  return HasTurn(names.parts);
}

Result<bool> WorldCommit::HasTurn(const std::vector<std::string>& parts) {
  std::set<std::pair<uint32_t, Digest>> nodes;  // by the first rank
  for (const std::string& path : parts) {
    const auto part = ParseCommitName(path);
    if (part && part->kind == Kind::kPart) nodes.emplace(part->first_rank, part->node);
  }
  for (const auto& [rank, other] : nodes) {
    if (other == node()) return true;
    CKPT_ASSIGN_OR_RETURN(const bool gone, HasGone(other));
    if (!gone) return false;
  }
  return true;
}

Result<AttemptNews> WorldCommit::Look(const AttemptName& name, bool publish) {
  CKPT_ASSIGN_OR_RETURN(const Later later, SavesAfter(name));  // before the others
  CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(name));
  if (names.done) return Done(name);
  if (names.outcome) {
    const std::string path = OutcomeName(name);
    CKPT_ASSIGN_OR_RETURN(const std::string text,
                          ReadWhole(*store_.storage(), path, kRecordMaxBytes));
    CKPT_ASSIGN_OR_RETURN(const AttemptOutcome outcome, ParseOutcome(text, *ParseCommitName(path)));
    if (!outcome.manifest) return Dropped(outcome);
    if (publish) {
      auto finished = Finish(outcome);
      // Without its manifest, or with a damaged one, it is made from its parts once more.
      const ErrorCode why = finished ? ErrorCode::kInternal : finished.error().code;
      if (why != ErrorCode::kNotFound && why != ErrorCode::kDataLoss) return finished;
    }
  }
  CKPT_ASSIGN_OR_RETURN(AttemptNews news, Waiting(name, names, later, publish));
  if (names.outcome && news.state == State::kWaiting) news.state = State::kDecided;
  return news;
}

Result<AttemptNews> WorldCommit::Waiting(const AttemptName& name, const Names& names,
                                         const Later& later, bool publish) {
  CKPT_ASSIGN_OR_RETURN(const auto parts, PartsOf(names));
  AttemptNews news;
  news.later = later.steps;
  const uint32_t world = parts.empty() ? 0 : parts.begin()->second->world;
  for (uint32_t rank = 0; rank < world; ++rank) {
    if (parts.contains(rank)) continue;
    news.missing.insert(rank);
    if (later.ranks.contains(rank)) news.passed.insert(rank);
  }
  news.whole = !parts.empty() && news.missing.empty();
  return news.whole && publish ? Publish(name, parts) : news;
}

Result<StepModel> WorldCommit::ModelOfParts(const std::map<uint32_t, const PreparedPart*>& parts,
                                            BlobHolds& holds) {
  const std::shared_ptr<const Root> blobs = RootBelow(store_.storage(), "blobs");
  std::vector<std::string> paths;
  std::vector<const PreparedRank*> ranks;
  for (const auto& [number, part] : parts) {
    paths.push_back(part->PathOf(number));
    const auto rank = std::find_if(part->ranks.begin(), part->ranks.end(),
                                   [n = number](const PreparedRank& r) { return r.rank == n; });
    ranks.push_back(&*rank);
    CKPT_RETURN_IF_ERROR(CheckFile(*blobs, *part, *rank));
  }
  CKPT_ASSIGN_OR_RETURN(StepModel model, model_of_(blobs, paths));
  const PreparedPart& first = *parts.begin()->second;  // rank 0's
  if (model.iteration != first.step) return Refuse("its files belong to step ", model.iteration);
  CKPT_ASSIGN_OR_RETURN(
      const KeptFiles kept,
      KeptFiles::Hold(store_, first.name.run, model, paths.size(),
                      [this](const std::string& directory) { return said_.Hold(directory); }));
  holds = kept.holds();
  OwnRankFiles(model, store_.blobs(), first.mtime_ns, ranks, kept.blobs());
  return model;
}

// `decided`: what was decided, by whomever.
Status WorldCommit::Decide(const AttemptOutcome& outcome, std::optional<AttemptOutcome>& decided) {
  const std::string path = OutcomeName(outcome.name);
  Status published = PublishText(*store_.storage(), path, RenderOutcome(outcome));
  FaultPoint();
  if (published) {
    decided = outcome;
    return {};
  }
  if (!IsThere(published)) return published;
  CKPT_ASSIGN_OR_RETURN(const std::string text,
                        ReadWhole(*store_.storage(), path, kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(decided, ParseOutcome(text, *ParseCommitName(path)));
  return {};
}

Result<AttemptNews> WorldCommit::Publish(const AttemptName& name,
                                         const std::map<uint32_t, const PreparedPart*>& parts) {
  const PreparedPart& first = *parts.begin()->second;
  // Before the last look at the parts: until they have gone nobody reclaims their files, and
  // from then on this is seen.
  CKPT_ASSIGN_OR_RETURN(const auto files, said_.Hold(StrCat("blobs/", first.Directory())));
  CKPT_ASSIGN_OR_RETURN(const auto held, store_.HoldBlobs(first.PathOf(0)));
  CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(name));
  CKPT_ASSIGN_OR_RETURN(const auto there, PartsOf(names));
  if (names.done || there.size() != parts.size()) return AttemptNews();  // looked at again
  const auto latest = store_.Resolve(name.run, "latest");
  if (latest && latest->root != SnapshotHome(name.run)) {
    return Drop(name, first.step, StrCat("run '", name.run, "' belongs to ", latest->root));
  }
  BlobHolds kept;
  PutStep put;
  CKPT_ASSIGN_OR_RETURN(put.model, ModelOfParts(parts, kept));
  CKPT_ASSIGN_OR_RETURN(put.rendered, store_.Render(put.model));
  CKPT_ASSIGN_OR_RETURN(const auto manifest, said_.Hold(ManifestName(put.rendered.manifest)));
  CKPT_ASSIGN_OR_RETURN(put.hold, store_.Put(put.rendered));
  FaultPoint();
  std::optional<AttemptOutcome> decided;
  CKPT_RETURN_IF_ERROR(
      Decide(AttemptOutcome{name, first.step, node(), put.rendered.manifest, ""}, decided));
  if (!decided->manifest) return Dropped(*decided);
  if (*decided->manifest == put.rendered.manifest) {
    return PublishPut(name, first.step, put);
  }
  auto finished = Finish(*decided);  // another build's
  if (finished || finished.error().code != ErrorCode::kNotFound) return finished;
  return Fail(ErrorCode::kUnsupported,
              "another build of ckptfs began to publish this step; that build has to finish it");
}

Result<AttemptNews> WorldCommit::Finish(const AttemptOutcome& outcome) {
  const AttemptName& name = outcome.name;
  const PreparedPart part{name, outcome.step, 0, 0, {}};
  CKPT_ASSIGN_OR_RETURN(const auto files, said_.Hold(StrCat("blobs/", part.Directory())));
  CKPT_ASSIGN_OR_RETURN(const auto held, store_.HoldBlobs(part.PathOf(0)));
  CKPT_ASSIGN_OR_RETURN(const auto manifest, said_.Hold(ManifestName(*outcome.manifest)));
  // After that nobody collects it; before, it may have been published, and collected.
  CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(name));
  if (names.done || !names.outcome) return AttemptNews();  // looked at again
  CKPT_ASSIGN_OR_RETURN(const PutStep put, store_.FindPut(*outcome.manifest));
  return PublishPut(name, outcome.step, put);
}

Result<AttemptNews> WorldCommit::PublishPut(const AttemptName& name, uint64_t step,
                                            const PutStep& put) {
  const std::string home = SnapshotHome(name.run);
  AttemptNews news;
  CKPT_ASSIGN_OR_RETURN(news.record, store_.Publish(name.run, put.model, put.rendered,
                                                    StrCat(home, "/", step), home));
  FaultPoint();
  const AttemptDone done{node(), news.record->id, put.rendered.manifest};
  const Status told = PublishText(*store_.storage(), DoneName(name), RenderDone(done));
  if (!told && !IsThere(told)) return Fail(Error(told.error()));
  FaultPoint();
  ForgetPart(name);
  if (!ForgetDone(name)) published_.insert(name);
  news.state = State::kDurable;
  news.published = true;
  return news;
}

Result<AttemptNews> WorldCommit::Drop(const AttemptName& name, uint64_t step,
                                      const std::string& why) {
  std::optional<AttemptOutcome> decided;
  CKPT_RETURN_IF_ERROR(Decide(AttemptOutcome{name, step, node(), std::nullopt, why}, decided));
  if (decided->manifest) return Look(name, true);
  return Dropped(*decided);
}

AttemptNews WorldCommit::Dropped(const AttemptOutcome& outcome) {
  if (outcome.node == node()) drops_.try_emplace(outcome.name, Clock::now());
  ForgetPart(outcome.name);
  AttemptNews news;
  news.state = State::kDropped;
  news.why = outcome.dropped;
  return news;
}

Result<AttemptNews> WorldCommit::Done(const AttemptName& name) {
  CKPT_ASSIGN_OR_RETURN(const std::string text,
                        ReadWhole(*store_.storage(), DoneName(name), kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(const AttemptDone done, ParseDone(text));
  AttemptNews news;
  news.state = State::kDurable;
  CKPT_RETURN_IF_ERROR(store_.RefreshStep(name.run, done.id));
  auto record = store_.Resolve(name.run, done.id);
  if (record && record->manifest == done.manifest) news.record = *std::move(record);
  ForgetPart(name);
  return news;
}

// ---- what goes -----------------------------------------------------------------

// If this fails, what is left goes with this daemon (prepared_sweep.h).
void WorldCommit::Forget(const std::string& path) {
  (void)store_.storage()->Remove(path);
  FaultPoint();
}

// Where folders are directories they stay when the last name goes.
void WorldCommit::Prune(const std::string& folder) const {
  if (!store_.directory().empty()) (void)rmdir(StrCat(store_.directory(), "/", folder).c_str());
}

void WorldCommit::ForgetPart(const AttemptName& name) {
  const auto mine = ours_.extract(name);
  if (!mine.empty()) {
    for (const std::string& path : mine.mapped()) Forget(path);
  }
  const std::string folder = StrCat(AttemptFolder(name), "/");
  parts_.erase(parts_.lower_bound(folder), parts_.lower_bound(StrCat(AttemptFolder(name), "0")));
  Prune(AttemptFolder(name));
}

// A daemon removes its part when it has seen what became of the attempt.
bool WorldCommit::ForgetDone(const AttemptName& name) {
  const auto names = NamesOf(name);
  if (!names || !names->parts.empty()) return false;
  if (names->outcome) Forget(OutcomeName(name));
  if (names->done) Forget(DoneName(name));
  Prune(AttemptFolder(name));
  Prune(LifeFolder(name));
  return true;
}

void WorldCommit::ForgetDrops(Clock::time_point now) {
  std::erase_if(drops_, [&](const auto& one) {
    return now - one.second >= kOutcomeStays && ForgetDone(one.first);
  });
}

// A daemon other than this one that has left something and works no more.
Result<bool> WorldCommit::AnyGone(const std::vector<std::string>& names) {
  CKPT_ASSIGN_OR_RETURN(const auto present, ReadPresences(*store_.storage()));
  std::set<Digest> nodes;
  for (const auto& [other, said] : present) nodes.insert(other);
  for (const std::string& path : names) {
    const auto name = ParseCommitName(path);
    if (name && (name->kind == Kind::kPart || name->kind == Kind::kRanks)) nodes.insert(name->node);
  }
  nodes.erase(node());
  bool any = false;
  for (const Digest& other : nodes) {
    const auto said = present.find(other);
    const auto now = said == present.end() ? std::nullopt : std::optional(said->second);
    any = store_.presences().Look(store_.directory(), other, now, Clock::now()) ==
              PresenceState::kGone ||
          any;
  }
  return any;
}

// True if no daemon that works comes before this one, in the order of their numbers.
Result<bool> WorldCommit::IsFirst() {
  const auto entries = store_.storage()->List(kNodesFolder);
  if (!entries && entries.error().code == ErrorCode::kNotFound) return true;
  if (!entries) return Fail(Error(entries.error()));
  std::set<Digest> others;
  for (const RootEntry& entry : *entries) {
    const auto other = DigestNamed(entry.name);
    if (other && *other < node()) others.insert(*other);
  }
  for (const Digest& other : others) {
    CKPT_ASSIGN_OR_RETURN(const bool gone, HasGone(other));
    if (!gone) return false;
  }
  return true;
}

Result<bool> WorldCommit::FinishOthers(Clock::time_point now, Clock::duration quiet) {
  std::erase_if(published_, [this](const AttemptName& name) { return ForgetDone(name); });
  ForgetDrops(now);
  CKPT_ASSIGN_OR_RETURN(const bool first, IsFirst());
  if (!first) return false;
  CKPT_RETURN_IF_ERROR(
      MoveFlatRecords(*store_.storage(), [this](const Digest& other) { return HasGone(other); }));
  CKPT_ASSIGN_OR_RETURN(const auto names, ListFilesBelow(*store_.storage(), kPreparedFolder));
  std::erase_if(parts_, [&](const auto& one) {
    return !std::binary_search(names.begin(), names.end(), one.first);
  });
  std::map<std::string, std::set<std::string>> attempts;
  for (const std::string& path : names) {
    const auto name = ParseCommitName(path);
    const bool job = name && (name->kind == Kind::kRanks || name->kind == Kind::kWorld);
    if (name && !job) attempts[ParentPath(path)].insert(path);
  }
  std::erase_if(left_, [&](const auto& one) { return !attempts.contains(one.first); });
  for (auto& [folder, there] : attempts) {
    Left& left = left_[folder];
    if (left.names != there) left = Left{there, now};
    const bool ours = std::any_of(there.begin(), there.end(), [&](const std::string& path) {
      return ParseCommitName(path)->node == node();
    });
    if (ours || now - left.since < quiet) continue;
    left.since = now;
    const auto turn = HasTurn({there.begin(), there.end()});
    if (!turn || !*turn) continue;  // it is somebody's who works
    for (const std::string& path : there) {
      if (ParseCommitName(path)->kind != Kind::kPart) continue;
      const auto part = PartAt(path);
      if (!part || *part == nullptr) continue;
      (void)Look(AttemptName((*part)->name), true);  // on failure it stays as it is
      break;
    }
  }
  return AnyGone(names);
}

// ---- models --------------------------------------------------------------------

Blob FileOf(const PreparedPart& part, const PreparedRank& rank) {
  Blob blob;
  blob.path = part.PathOf(rank.rank);
  blob.stamp.size = rank.bytes;
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = rank.chunks;
  blob.chunk_list = rank.chunk_list;
  return blob;
}

Status CheckFile(const Root& root, const PreparedPart& part, const PreparedRank& rank) {
  const std::string path = part.PathOf(rank.rank);
  CKPT_ASSIGN_OR_RETURN(const EntryStat found, StatFile(root, path));
  if (found.stamp.size == rank.bytes) return {};
  return Fail(ErrorCode::kDataLoss, StrCat(root.PathOf(path), ": ", found.stamp.size,
                                           " bytes, but its record says ", rank.bytes));
}

void OwnRankFiles(StepModel& model, const std::string& blobs, int64_t mtime_ns,
                  const std::vector<const PreparedRank*>& ranks, const std::vector<Blob>& kept) {
  CKPT_CHECK(model.blobs.size() == ranks.size() + kept.size());
  model.mtime_ns = mtime_ns;
  model.roots = {blobs};
  for (size_t i = 0; i < kept.size(); ++i) {
    Blob& blob = model.blobs[ranks.size() + i];
    blob = kept[i];
    blob.root = 0;
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    Blob& blob = model.blobs[i];
    blob.stamp = BlobStamp{blob.stamp.size, 0, 0, 0};
    blob.store_owned = true;
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = ranks[i]->chunks;
    blob.chunk_list = ranks[i]->chunk_list;
  }
}

std::string SnapshotHome(const std::string& run) { return StrCat(kSnapshotRoot, run); }

}  // namespace ckptfs
