// SPDX-License-Identifier: Apache-2.0
#include "core/commit/world_commit.h"

#include <algorithm>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_stamp.h"
#include "core/records/records.h"
#include "core/store/lives.h"
#include "core/store/store_index.h"

namespace ckptfs {
namespace {

using Kind = CommitName::Kind;
using State = AttemptNews::State;

constexpr std::chrono::minutes kOutcomeStays{10};  // for daemons that have no part yet

// The prefix of all names of an attempt.
std::string PrefixOf(std::string_view path) {
  return std::string(path.substr(0, path.rfind('-') + 1));
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

bool WorldCommit::IsGone(const Digest& other, const std::map<Digest, NodePresence>& present) {
  const auto said = present.find(other);
  return store_.presences().Look(store_.directory(), other,
                                 said == present.end() ? std::nullopt : std::optional(said->second),
                                 Clock::now()) == PresenceState::kGone;
}

Result<bool> WorldCommit::HasGone(const Digest& other) {
  CKPT_ASSIGN_OR_RETURN(const auto said, ReadPresence(*store_.storage(), other));
  return store_.presences().Look(store_.directory(), other, said, Clock::now()) ==
         PresenceState::kGone;
}

// ---- who is where --------------------------------------------------------------

Result<JobWorld> WorldCommit::Join(NodeRanks mine) {
  mine.host = said_.host();
  const Job job{mine.run, mine.job};
  const std::string path = NodeRanksName(mine.run, mine.job, node());
  NodeRanks& said = joined_[job];
  if (said != mine) {
    if (!joined_holds_[job]) {
      CKPT_ASSIGN_OR_RETURN(joined_holds_[job], said_.Hold(path));
    }
    CKPT_ASSIGN_OR_RETURN(const auto writer, store_.storage()->Create(path));
    const std::string text = RenderNodeRanks(mine);
    CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(text))));
    CKPT_RETURN_IF_ERROR(writer->Close());
    FaultPoint();
    said = mine;
  }
  JobWorld world;
  std::map<uint32_t, uint64_t> lives = mine.ranks;
  CKPT_ASSIGN_OR_RETURN(const auto paths, List());
  CKPT_ASSIGN_OR_RETURN(const auto present, ReadPresences(*store_.storage()));
  for (const std::string& other : paths) {
    const auto name = ParseCommitName(other);
    if (!name || name->kind != Kind::kRanks || other == path || PrefixOf(other) != PrefixOf(path) ||
        IsGone(name->node, present)) {
      continue;
    }
    const auto text = ReadWhole(*store_.storage(), other, kPreparedMaxBytes);
    if (!text && text.error().code == ErrorCode::kNotFound) continue;
    if (!text) return Fail(Error(text.error()));
    CKPT_ASSIGN_OR_RETURN(const NodeRanks theirs, ParseNodeRanks(*text, *name));
    if (theirs.world != mine.world) {
      return Fail(ErrorCode::kExists, StrCat("the job has ", mine.world, " ranks here, but ",
                                             theirs.world, " on ", theirs.host));
    }
    for (const auto& [rank, life] : theirs.ranks) {
      const auto [at, added] = lives.emplace(rank, life);
      if (at->second != life) {
        return Fail(ErrorCode::kExists,
                    StrCat("rank ", rank, " has another life on ", theirs.host,
                           "; give each life of a job a `job` text of its own"));
      }
      if (!mine.ranks.contains(rank)) world.elsewhere[rank] = theirs.host;
    }
  }
  if (lives.size() == mine.world) world.life = LifeOf(lives);
  return world;
}

void WorldCommit::Leave(const std::string& run, const std::string& job) {
  joined_.erase({run, job});
  joined_holds_.erase({run, job});
  Forget(NodeRanksName(run, job, node()));
}

// ---- parts ---------------------------------------------------------------------

Result<std::vector<std::string>> WorldCommit::List() const {
  return ListFilesBelow(*store_.storage(), kPreparedFolder);
}

Result<WorldCommit::Names> WorldCommit::NamesOf(const AttemptName& name) const {
  const std::string prefix = PrefixOf(OutcomeName(name));
  CKPT_ASSIGN_OR_RETURN(const auto paths, List());
  Names names;
  for (const std::string& path : paths) {
    if (!path.starts_with(prefix)) continue;
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
      if (!added && std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
        return Refuse("rank ", rank.rank, " handed over two parts");
      }
    }
  }
  return by_rank;
}

Result<WorldCommit::Prepared> WorldCommit::WhatIsPrepared(PreparedPart& part) {
  CKPT_ASSIGN_OR_RETURN(Names names, NamesOf(part.name));
  if (names.outcome) return Prepared::kAll;
  // Another daemon has a part with one of our ranks if that rank's file is there, or if the part's
  // name says so.  Without either no part needs to be read: who publishes reads all of them, and
  // finds a rank that is there twice.
  bool written = false;
  for (const PreparedRank& rank : part.ranks) {
    if (written) break;
    CKPT_ASSIGN_OR_RETURN(written,
                          HasFile(*store_.storage(), StrCat("blobs/", part.PathOf(rank.rank))));
  }
  if (!written) {
    std::erase_if(names.parts, [&](const std::string& path) {
      const uint32_t first = ParseCommitName(path)->first_rank;
      return !std::ranges::binary_search(part.ranks, first, {}, &PreparedRank::rank);
    });
  }
  CKPT_ASSIGN_OR_RETURN(const auto by_rank, PartsOf(names));
  uint64_t same = 0;
  for (const PreparedRank& rank : part.ranks) {
    const auto found = by_rank.find(rank.rank);
    if (found == by_rank.end()) continue;
    const auto& ranks = found->second->ranks;
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
      return Fail(ErrorCode::kExists, StrCat("rank ", rank.rank, " handed over two parts"));
    }
    part.mtime_ns = found->second->mtime_ns;
    ++same;
  }
  if (same == 0) return Prepared::kNothing;
  if (same < part.ranks.size()) {
    return Fail(ErrorCode::kExists, "another daemon already has a part of this save");
  }
  const std::string mine = PartName(part, node());
  return std::ranges::find(names.parts, mine) != names.parts.end() ? Prepared::kAll
                                                                   : Prepared::kFiles;
}

Status WorldCommit::Prepare(PreparedPart part, const Root& bytes) {
  CKPT_ASSIGN_OR_RETURN(const Prepared there, WhatIsPrepared(part));
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
  const Status published = PublishText(*store_.storage(), PartName(part, node()), RenderPart(part));
  FaultPoint();
  return IsThere(published) ? Status() : published;  // an earlier try's
}

void WorldCommit::Withdraw(const AttemptName& name) {
  if (const auto names = NamesOf(name)) ForgetPart(name, *names, true);
}

// ---- what becomes of an attempt ------------------------------------------------

struct WorldCommit::Later {
  std::set<uint32_t> ranks;
  std::map<uint64_t, uint64_t> steps;  // by attempt
};

// A daemon prepares the saves of a rank in order, so what is not there of a rank that has a part in
// a later one never comes.
Result<WorldCommit::Later> WorldCommit::SavesAfter(const AttemptName& name) {
  const CommitName mine = *ParseCommitName(OutcomeName(name));
  CKPT_ASSIGN_OR_RETURN(const auto paths, List());
  Later later;
  for (const std::string& path : paths) {
    const auto other = ParseCommitName(path);
    if (!other || other->kind != Kind::kPart || other->job != mine.job ||
        other->attempt <= mine.attempt) {
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(const PreparedPart* const part, PartAt(path));
    if (part == nullptr) continue;
    later.steps.emplace(other->attempt, part->step);
    for (const PreparedRank& rank : part->ranks) later.ranks.insert(rank.rank);
  }
  return later;
}

Result<std::optional<AttemptNews>> WorldCommit::Glance(const AttemptName& name) {
  Names names;
  CKPT_ASSIGN_OR_RETURN(names.done, HasFile(*store_.storage(), DoneName(name)));
  if (!names.done) {
    const auto text = ReadWhole(*store_.storage(), OutcomeName(name), kRecordMaxBytes);
    if (!text && text.error().code == ErrorCode::kNotFound) return std::nullopt;
    if (!text) return Fail(Error(text.error()));
    CKPT_ASSIGN_OR_RETURN(const AttemptOutcome outcome,
                          ParseOutcome(*text, *ParseCommitName(OutcomeName(name))));
    if (outcome.manifest) return std::nullopt;
    CKPT_ASSIGN_OR_RETURN(names, NamesOf(name));
    return Dropped(name, names, outcome);
  }
  CKPT_ASSIGN_OR_RETURN(names, NamesOf(name));
  return Done(name, names);
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
  if (names.done) return Done(name, names);
  if (names.outcome) {
    const std::string path = OutcomeName(name);
    CKPT_ASSIGN_OR_RETURN(const std::string text,
                          ReadWhole(*store_.storage(), path, kRecordMaxBytes));
    CKPT_ASSIGN_OR_RETURN(const AttemptOutcome outcome, ParseOutcome(text, *ParseCommitName(path)));
    if (!outcome.manifest) return Dropped(name, names, outcome);
    if (publish) {
      auto finished = Finish(outcome);
      // Without its manifest, or with a damaged one, it is made from its parts once more.
      const ErrorCode why = finished ? ErrorCode::kInternal : finished.error().code;
      if (why != ErrorCode::kNotFound && why != ErrorCode::kDataLoss) return finished;
    }
  }
  return Waiting(name, names, later, publish);
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
  std::vector<const std::vector<Digest>*> chunks;
  for (const auto& [number, part] : parts) {
    paths.push_back(part->PathOf(number));
    const auto rank = std::find_if(part->ranks.begin(), part->ranks.end(),
                                   [n = number](const PreparedRank& r) { return r.rank == n; });
    chunks.push_back(&rank->chunks);
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
  OwnRankFiles(model, store_.blobs(), first.mtime_ns, chunks, kept.blobs());
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
  if (!decided->manifest) return Dropped(name, names, *decided);
  if (*decided->manifest == put.rendered.manifest) {
    return PublishPut(name, names, first.step, put);
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
  return PublishPut(name, names, outcome.step, put);
}

Result<AttemptNews> WorldCommit::PublishPut(const AttemptName& name, const Names& names,
                                            uint64_t step, const PutStep& put) {
  const std::string home = SnapshotHome(name.run);
  AttemptNews news;
  CKPT_ASSIGN_OR_RETURN(news.record, store_.Publish(name.run, put.model, put.rendered,
                                                    StrCat(home, "/", step), home));
  FaultPoint();
  const AttemptDone done{node(), news.record->id, put.rendered.manifest};
  const Status told = PublishText(*store_.storage(), DoneName(name), RenderDone(done));
  if (!told && !IsThere(told)) return Fail(Error(told.error()));
  FaultPoint();
  ForgetPart(name, names, true);
  news.state = State::kDurable;
  news.published = true;
  return news;
}

Result<AttemptNews> WorldCommit::Drop(const AttemptName& name, uint64_t step,
                                      const std::string& why) {
  std::optional<AttemptOutcome> decided;
  CKPT_RETURN_IF_ERROR(Decide(AttemptOutcome{name, step, node(), std::nullopt, why}, decided));
  if (decided->manifest) return Look(name, true);
  CKPT_ASSIGN_OR_RETURN(const Names names, NamesOf(name));
  return Dropped(name, names, *decided);
}

Result<AttemptNews> WorldCommit::Dropped(const AttemptName& name, const Names& names,
                                         const AttemptOutcome& outcome) {
  if (outcome.node == node()) outcomes_.try_emplace(OutcomeName(name), Clock::now());
  ForgetPart(name, names, false);
  AttemptNews news;
  news.state = State::kDropped;
  news.why = outcome.dropped;
  return news;
}

Result<AttemptNews> WorldCommit::Done(const AttemptName& name, const Names& names) {
  CKPT_ASSIGN_OR_RETURN(const std::string text,
                        ReadWhole(*store_.storage(), DoneName(name), kRecordMaxBytes));
  CKPT_ASSIGN_OR_RETURN(const AttemptDone done, ParseDone(text));
  AttemptNews news;
  news.state = State::kDurable;
  CKPT_RETURN_IF_ERROR(store_.RefreshStep(name.run, done.id));
  auto record = store_.Resolve(name.run, done.id);
  if (record && record->manifest == done.manifest) news.record = *std::move(record);
  ForgetPart(name, names, true);
  return news;
}

// ---- what goes -----------------------------------------------------------------

// If this fails, what is left goes with this daemon (prepared_sweep.h).
void WorldCommit::Forget(const std::string& path) {
  (void)store_.storage()->Remove(path);
  FaultPoint();
}

// `all`: it is a step; the last one forgets what is left.
void WorldCommit::ForgetPart(const AttemptName& name, const Names& names, bool all) {
  bool others = false;
  for (const std::string& path : names.parts) {
    const bool mine = ParseCommitName(path)->node == node();
    if (mine) Forget(path);
    others = others || !mine;
    parts_.erase(path);
  }
  if (!all) return;
  if (others) {
    const auto now = NamesOf(name);
    others = !now || !now->parts.empty();
  }
  if (others) return;
  Forget(OutcomeName(name));
  Forget(DoneName(name));
}

void WorldCommit::ForgetOutcomes(const std::vector<std::string>& names, Clock::time_point now) {
  for (auto at = outcomes_.begin(); at != outcomes_.end();) {
    const std::string prefix = PrefixOf(at->first);
    const bool parts = std::any_of(names.begin(), names.end(), [&](const std::string& path) {
      const auto name = ParseCommitName(path);
      return name && name->kind == Kind::kPart && path.starts_with(prefix);
    });
    if (parts || now - at->second < kOutcomeStays) {
      ++at;
      continue;
    }
    Forget(at->first);
    at = outcomes_.erase(at);
  }
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
  for (const Digest& other : nodes) any = IsGone(other, present) || any;
  return any;
}

Result<bool> WorldCommit::FinishOthers(Clock::time_point now, Clock::duration quiet) {
  CKPT_ASSIGN_OR_RETURN(const auto names, List());
  std::erase_if(parts_, [&](const auto& one) {
    return !std::binary_search(names.begin(), names.end(), one.first);
  });
  std::map<std::string, std::set<std::string>> attempts;
  for (const std::string& path : names) {
    const auto name = ParseCommitName(path);
    if (name && name->kind != Kind::kRanks) attempts[PrefixOf(path)].insert(path);
  }
  std::erase_if(left_, [&](const auto& one) { return !attempts.contains(one.first); });
  for (auto& [prefix, there] : attempts) {
    Left& left = left_[prefix];
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
  ForgetOutcomes(names, now);
  return AnyGone(names);
}

// ---- models --------------------------------------------------------------------

Blob FileOf(const PreparedPart& part, const PreparedRank& rank) {
  Blob blob;
  blob.path = part.PathOf(rank.rank);
  blob.stamp.size = rank.bytes;
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = rank.chunks;
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
                  const std::vector<const std::vector<Digest>*>& chunks,
                  const std::vector<Blob>& kept) {
  CKPT_CHECK(model.blobs.size() == chunks.size() + kept.size());
  model.mtime_ns = mtime_ns;
  model.roots = {blobs};
  for (size_t i = 0; i < kept.size(); ++i) {
    Blob& blob = model.blobs[chunks.size() + i];
    blob = kept[i];
    blob.root = 0;
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    Blob& blob = model.blobs[i];
    blob.stamp = BlobStamp{blob.stamp.size, 0, 0, 0};
    blob.store_owned = true;
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = *chunks[i];
  }
}

std::string SnapshotHome(const std::string& run) { return StrCat(kSnapshotRoot, run); }

}  // namespace ckptfs
