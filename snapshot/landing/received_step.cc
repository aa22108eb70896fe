// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/received_step.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

constexpr size_t kRemembered = 4096;
constexpr size_t kRememberedRanks = 1 << 16;
constexpr size_t kRememberedAttempts = 16;

constexpr size_t kDropsTogether = 64;

// True if both are of one job.
bool IsOf(const AttemptName& one, const AttemptName& other) {
  return one.run == other.run && one.job == other.job;
}

// Returns where the attempts of a job begin in what is ordered by attempt.
AttemptName FirstOf(const AttemptName& job) { return {job.run, job.job}; }

template <class Container>
bool HasAny(const Container& ordered, const AttemptName& job) {
  const auto at = ordered.lower_bound(FirstOf(job));
  if (at == ordered.end()) return false;
  if constexpr (requires { at->first; }) {
    return IsOf(at->first, job);
  } else {
    return IsOf(*at, job);
  }
}

}  // namespace

ReceivedPart PartOf(ReceivedStep step) {
  ReceivedPart part{std::move(step.name),
                    step.step,
                    static_cast<uint32_t>(step.files.size()),
                    {},
                    IncomingSteps::Time::clock::now()};
  part.name.life = step.life;
  for (ReceivedFile& file : step.files) {
    part.files.emplace(static_cast<uint32_t>(part.files.size()), std::move(file));
  }
  return part;
}

std::optional<ReceivedStep> IncomingSteps::Add(const AttemptName& name, uint64_t step,
                                               uint32_t rank, uint32_t world, ReceivedFile file,
                                               Time now) {
  if (const auto gone = gone_.find(name); gone != gone_.end()) {
    dropped_.push_back({name, step, gone->second.why, true, greetings_});
    return std::nullopt;
  }
  const auto [at, fresh] = open_.try_emplace(name, Open{step, world, now});
  Open& open = at->second;
  if (open.step != step || open.world != world) {
    Drop(name, step,
         StrCat("its ranks disagree: step ", open.step, " of ", open.world, " ranks, step ", step,
                " of ", world));
    return std::nullopt;
  }
  if (!open.here.Insert(rank)) {
    Drop(name, step, StrCat("rank ", rank, " handed its part over twice"));
    return std::nullopt;
  }
  open.files.emplace(rank, std::move(file));
  by_age_.emplace(open.first, name);
  moved_.insert(name);
  if (open.files.size() == world) {
    ReceivedStep whole{name, step, {}, LifeOf(name)};
    for (auto& [number, part] : open.files) whole.files.push_back(std::move(part));
    Forget(name);
    kept_.insert(name);
    return whole;
  }
  // Ranks that pass it over later, or end later, drop it then.
  if (!fresh) return std::nullopt;
  DropPassed(name, step);
  for (const uint32_t ended : lives_of_jobs_.Ended(name.run, name.job)) {
    const auto still = open_.find(name);
    if (still == open_.end()) break;
    if (Lacks(still->second, ended)) DropOfEnded(name, ended);
  }
  return std::nullopt;
}

void IncomingSteps::Close(const AttemptName& name) {
  const auto at = open_.find(name);
  if (at == open_.end()) return;
  by_age_.erase({at->second.first, name});
  moved_.insert(name);
  open_.erase(at);
}

void IncomingSteps::Forget(const AttemptName& name) {
  Close(name);
  lives_.erase(name);
  kept_.erase(name);
}

Digest IncomingSteps::LifeOf(const AttemptName& name) {
  const auto [at, fresh] = lives_.try_emplace(name);
  if (fresh) at->second = RandomDigest();
  return at->second;
}

void IncomingSteps::Drop(const AttemptName& name, uint64_t step, const std::string& why) {
  if (!gone_.emplace(name, Gone{why, drops_}).second) return;
  gone_in_order_.emplace(drops_++, name);
  if (gone_in_order_.size() > kRemembered) {
    gone_.erase(gone_in_order_.begin()->second);
    gone_in_order_.erase(gone_in_order_.begin());
  }
  Close(name);
  lives_.erase(name);
  dropped_.push_back({name, step, why, false, greetings_});
}

bool IncomingSteps::Begun::Passes(uint64_t attempt) const {
  if (!first || attempt < std::max(*first, attempts.begin()->first)) return false;
  return attempt < last() && !Has(attempt);
}

const IncomingSteps::JobBegun& IncomingSteps::BegunOf(const AttemptName& job) const {
  static const JobBegun none;
  const auto found = begun_.find({job.run, job.job});
  return found == begun_.end() ? none : found->second;
}

IncomingSteps::Begun& IncomingSteps::Note(const AttemptName& name, uint64_t step, uint32_t rank) {
  JobBegun& job = begun_[{name.run, name.job}];
  const auto [at, fresh] = job.ranks.try_emplace(rank);
  Begun& begun = at->second;
  if (fresh) {
    ++begun_ranks_;
  } else {
    const auto turn = job.turns.find(TurnOf(begun.last()));
    if (--turn->second == 0) job.turns.erase(turn);
  }
  ++job.turns[TurnOf(name.attempt)];
  begun.attempts.emplace(name.attempt, step);
  if (begun.attempts.size() > kRememberedAttempts) begun.attempts.erase(begun.attempts.begin());
  return begun;
}

void IncomingSteps::ForgetBegun(const AttemptName& of, uint32_t rank) {
  const auto job = begun_.find({of.run, of.job});
  if (job == begun_.end()) return;
  const auto at = job->second.ranks.find(rank);
  if (at == job->second.ranks.end()) return;
  const auto turn = job->second.turns.find(TurnOf(at->second.last()));
  if (--turn->second == 0) job->second.turns.erase(turn);
  job->second.ranks.erase(at);
  --begun_ranks_;
}

bool IncomingSteps::Begin(const AttemptName& name, uint64_t step, uint32_t rank, bool again) {
  if (begun_ranks_ > kRememberedRanks) {
    begun_.clear();
    begun_ranks_ = 0;
  }
  const auto& ranks = BegunOf(name).ranks;
  const auto known = ranks.find(rank);
  uint64_t last = name.attempt;  // the rank's own before this one
  if (known != ranks.end()) {
    last = known->second.last();
    if (name.attempt <= last) return false;
  }
  Begun& begun = Note(name, step, rank);
  if (!begun.first && !again) begun.first = name.attempt;
  // The attempts that the rank passes over lie between its last attempt and this one.
  std::vector<std::pair<AttemptName, uint64_t>> passed;
  for (auto at = open_.upper_bound({name.run, name.job, last}); at != open_.end(); ++at) {
    if (!IsOf(at->first, name) || at->first.attempt >= name.attempt) break;
    if (begun.Passes(at->first.attempt)) passed.emplace_back(at->first, at->second.step);
  }
  for (const auto& [other, its] : passed) DropPassed(other, its);
  DropEarlierSave(name, step, rank);
  if (!again) DropApart(name, step, rank);
  return true;
}

void IncomingSteps::Cancel(const AttemptName& name, uint64_t step, uint32_t rank,
                           const std::string& why) {
  const bool fresh = Begin(name, step, rank, true);  // it is over
  Drop(name, step, StrCat("rank ", rank, ": ", why));
  if (fresh) DropApart(name, step, rank);
}

void IncomingSteps::DropIf(const AttemptName& job, const std::string& why,
                           const std::function<bool(const AttemptName&, const Open&)>& of) {
  std::vector<std::pair<AttemptName, uint64_t>> found;
  for (auto at = open_.lower_bound(FirstOf(job)); at != open_.end() && IsOf(at->first, job); ++at) {
    if (of(at->first, at->second)) found.emplace_back(at->first, at->second.step);
  }
  for (const auto& [name, step] : found) Drop(name, step, why);
}

// Drops it so that a rank that tries again alone does not keep its arena full for nothing.
void IncomingSteps::DropEarlierSave(const AttemptName& name, uint64_t step, uint32_t rank) {
  const auto& begun = BegunOf(name).ranks;
  std::vector<AttemptName> earlier;
  for (const auto& [attempt, its] : begun.at(rank).attempts) {
    const AttemptName other{name.run, name.job, attempt};
    const auto open = attempt < name.attempt ? open_.find(other) : open_.end();
    if (open != open_.end() && open->second.step == step) earlier.push_back(other);
  }
  if (earlier.empty()) return;
  const auto ranks = lives_of_jobs_.RanksOf(name.run, name.job);
  for (const AttemptName& other : earlier) {
    const bool all = std::ranges::all_of(ranks, [&](uint32_t one) {
      const auto at = begun.find(one);
      return at != begun.end() && at->second.Has(other.attempt);
    });
    if (!all) Drop(other, step, StrCat("rank ", rank, " saved it again"));
  }
}

// A rank in a later turn has gone back, and the other one has not:
// it missed a save, say.  Their saves from now on would never meet.
void IncomingSteps::DropApart(const AttemptName& name, uint64_t step, uint32_t rank) {
  const JobBegun& job = BegunOf(name);
  if (job.turns.size() < 2) return;
  const Begun& mine = job.ranks.at(rank);
  const uint64_t turn = TurnOf(name.attempt);
  std::vector<AttemptName> apart;
  for (const auto& [other, theirs] : job.ranks) {
    const uint64_t their_turn = TurnOf(theirs.last());
    if (their_turn == turn) continue;
    const bool later = their_turn > turn;
    const Begun& ahead = later ? theirs : mine;
    const Begun& behind = later ? mine : theirs;
    // The attempt that the rank behind is at now.
    const AttemptName low{name.run, name.job, behind.last()};
    if (behind.attempts.rbegin()->second != step || ahead.Has(low.attempt)) continue;
    for (const auto& [attempt, saved] : ahead.attempts) {
      if (saved == step && TurnOf(attempt) > TurnOf(low.attempt)) {
        // The one that says where to go on comes first.
        apart.insert(apart.end(), {AttemptName{name.run, name.job, attempt}, low});
      }
    }
  }
  for (const AttemptName& one : apart) {
    if (IsGone(one)) dropped_.push_back({one, step, std::string(kApart), true, greetings_});
    Drop(one, step, std::string(kApart));
  }
}

// ---- lives ---------------------------------------------------------------------

Status IncomingSteps::Greet(const RankOfJob& who, JobLives::Comes how,
                            std::optional<JobLives::Time> born) {
  const AttemptName job{who.run, who.job};
  const bool busy = HasAny(kept_, job);
  CKPT_ASSIGN_OR_RETURN(const auto strangers, lives_of_jobs_.Greet(who, how, born, busy));
  const size_t before = dropped_.size();
  if (strangers.all) {
    DropIf(job, "another life of its job began", [](auto&, auto&) { return true; });
    ForgetLife(job);
    renewed_.emplace(who.run, who.job);
  }
  for (const uint32_t rank : strangers.ranks) {
    DropIf(job, StrCat("rank ", rank, " had gone when rank ", who.rank, "'s process began"),
           [&](auto&, const Open& open) { return open.files.contains(rank); });
    ForgetBegun(job, rank);
  }
  if (!strangers.ranks.empty()) {
    ForgetDrops(job);  // its own saves may have the same names
  }
  for (size_t i = before; i < dropped_.size(); ++i) dropped_[i].earlier = true;
  ++greetings_;
  return {};
}

void IncomingSteps::Leave(const RankOfJob& who, JobLives::Comes how, JobLives::Time seen) {
  if (lives_of_jobs_.Leave(who, how, seen)) DropOfEnded({who.run, who.job}, who.rank);
}

bool IncomingSteps::End(const std::vector<RankOfJob>& ranks) {
  for (const RankOfJob& who : ranks) {
    if (lives_of_jobs_.End(who)) DropOfEnded({who.run, who.job}, who.rank);
  }
  return !ranks.empty();
}

// Leaves what an earlier daemon was told: it may be stored already, and is looked for.
bool IncomingSteps::Lacks(const Open& open, uint32_t rank) {
  const auto again = [](const auto& one) { return one.second.again; };
  return rank < open.world && !open.here.Contains(rank) && std::ranges::none_of(open.files, again);
}

void IncomingSteps::DropOfEnded(const AttemptName& job, uint32_t rank) {
  DropIf(job, StrCat("rank ", rank, "'s process ended before it handed its part over"),
         [&](const AttemptName&, const Open& open) { return Lacks(open, rank); });
}

void IncomingSteps::Refuse(const RankOfJob& who, uint64_t attempt, const std::string& why) {
  if (attempt == 0 || !lives_of_jobs_.MayBeOf(who)) return;
  Cancel({who.run, who.job, attempt}, StepOf(attempt), who.rank, why);
}

void IncomingSteps::DropLeftBehind() {
  std::set<AttemptName> jobs;
  for (auto at = open_.begin(); at != open_.end();) {
    const AttemptName job = FirstOf(at->first);
    if (lives_of_jobs_.AllEnded(job.run, job.job)) jobs.insert(job);
    at = open_.upper_bound({job.run, job.job, UINT64_MAX, {UINT64_MAX, UINT64_MAX}});
  }
  for (const AttemptName& job : jobs) {
    DropIf(
        job, "all ranks that were here have ended, and others need the memory",
        [](const AttemptName&, const Open& open) { return open.files.size() == open.here.size(); });
  }
}

void IncomingSteps::ForgetLife(const AttemptName& job) {
  ForgetDrops(job);
  const auto begun = begun_.find({job.run, job.job});
  if (begun == begun_.end()) return;
  begun_ranks_ -= begun->second.ranks.size();
  begun_.erase(begun);
}

void IncomingSteps::ForgetDrops(const AttemptName& job) {
  auto at = gone_.lower_bound(FirstOf(job));
  while (at != gone_.end() && IsOf(at->first, job)) {
    gone_in_order_.erase(at->second.number);
    at = gone_.erase(at);
  }
}

void IncomingSteps::ForgetJobs() {
  const auto used = [this](const JobLives::JobName& name) {
    const AttemptName job{name.first, name.second};
    return HasAny(open_, job) || HasAny(kept_, job) || HasAny(gone_, job);
  };
  for (const auto& [run, job] : lives_of_jobs_.Forget(used)) ForgetLife({run, job});
}

bool IncomingSteps::DropUnmet(const AttemptName& name) {
  const Open& open = open_.at(name);
  for (const auto& [rank, file] : open.files) {
    if (lives_of_jobs_.HasMet(name.run, name.job, rank)) continue;
    Drop(name, open.step,
         StrCat("rank ", rank, " went away before the ranks of other machines were known"));
    return true;
  }
  return false;
}

// ---- parts ---------------------------------------------------------------------

void IncomingSteps::DropPassed(const AttemptName& name, uint64_t step) {
  std::set<uint32_t> ranks;
  for (const auto& [rank, begun] : BegunOf(name).ranks) {
    if (begun.Passes(name.attempt)) ranks.insert(rank);
  }
  if (ranks.empty()) return;
  Drop(name, step,
       StrCat(ranks.size() == 1 ? "rank " : "ranks ", RanksText(ranks), " went on without it"));
}

std::optional<IncomingSteps::Waiting> IncomingSteps::Find(const AttemptName& name) const {
  const auto at = open_.find(name);
  if (at == open_.end()) return std::nullopt;
  const Open& open = at->second;
  return Waiting{open.step, open.world, &open.here, !open.files.empty()};
}

std::vector<AttemptName> IncomingSteps::OpenOf(const std::string& run,
                                               const std::string& job) const {
  const AttemptName of{run, job};
  std::vector<AttemptName> names;
  for (auto at = open_.lower_bound(of); at != open_.end() && IsOf(at->first, of); ++at) {
    names.push_back(at->first);
  }
  return names;
}

bool IncomingSteps::HasOpen(const std::string& run, const std::string& job) const {
  return HasAny(open_, {run, job});
}

IncomingSteps::Part IncomingSteps::Take(const AttemptName& name) {
  Open& open = open_.at(name);
  by_age_.erase({open.first, name});
  moved_.insert(name);
  kept_.insert(name);
  return {open.first, std::exchange(open.files, {})};
}

bool IncomingSteps::DropOlder(Time limit, const Elsewhere& elsewhere) {
  for (size_t i = 0; i < kDropsTogether; ++i) {
    if (by_age_.empty() || by_age_.begin()->first >= limit) return false;
    const AttemptName name = by_age_.begin()->second;
    const Open& open = open_.at(name);
    const std::string missing =
        open.here.MissingText(open.world, elsewhere ? elsewhere(name) : std::set<uint32_t>());
    Drop(name, open.step, StrCat("nothing came from rank ", missing));
  }
  return true;
}

std::vector<DroppedStep> IncomingSteps::TakeDropped() { return std::exchange(dropped_, {}); }

}  // namespace ckptfs
