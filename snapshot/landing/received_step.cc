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

// True if both are of one job.
bool IsOf(const AttemptName& one, const AttemptName& other) {
  return one.run == other.run && one.job == other.job;
}

}  // namespace

bool IsSameSave(const ReceivedStep& a, const ReceivedStep& b) {
  return a.name == b.name && a.step == b.step &&
         std::equal(a.files.begin(), a.files.end(), b.files.begin(), b.files.end(),
                    [](const ReceivedFile& one, const ReceivedFile& other) {
                      return one.bytes == other.bytes && one.chunks == other.chunks;
                    });
}

std::optional<ReceivedStep> IncomingSteps::Add(const AttemptName& name, uint64_t step,
                                               uint32_t rank, uint32_t world, ReceivedFile file,
                                               Time now) {
  if (const auto gone = gone_.find(name); gone != gone_.end()) {
    dropped_.push_back({name, step, gone->second, true, greetings_});
    return std::nullopt;
  }
  const auto [at, first] = open_.try_emplace(name, Open{step, world, now, {}, {}});
  Open& open = at->second;
  if (open.step != step || open.world != world) {
    Drop(name, step,
         StrCat("its ranks disagree: step ", open.step, " of ", open.world, " ranks, step ", step,
                " of ", world));
    return std::nullopt;
  }
  if (open.taken.contains(rank) || !open.files.emplace(rank, std::move(file)).second) {
    Drop(name, step, StrCat("rank ", rank, " handed its part over twice"));
    return std::nullopt;
  }
  if (open.files.size() < world) {
    DropPassed(name, step);
    DropOfEnded(name);
    return std::nullopt;
  }
  ReceivedStep whole{name, step, {}, LifeOf(name)};
  for (auto& [number, part] : open.files) whole.files.push_back(std::move(part));
  Forget(name);
  kept_.insert(name);
  return whole;
}

void IncomingSteps::Forget(const AttemptName& name) {
  open_.erase(name);
  lives_.erase(name);
  kept_.erase(name);
}

Digest IncomingSteps::LifeOf(const AttemptName& name) {
  const auto [at, fresh] = lives_.try_emplace(name);
  if (fresh) at->second = RandomDigest();
  return at->second;
}

void IncomingSteps::Drop(const AttemptName& name, uint64_t step, const std::string& why) {
  if (!gone_.emplace(name, why).second) return;
  gone_in_order_.push_back(name);
  if (gone_in_order_.size() > kRemembered) {
    gone_.erase(gone_in_order_.front());
    gone_in_order_.pop_front();
  }
  open_.erase(name);
  lives_.erase(name);
  dropped_.push_back({name, step, why, false, greetings_});
}

bool IncomingSteps::Begin(const AttemptName& name, uint64_t step, uint32_t rank, bool again) {
  if (begun_.size() > kRememberedRanks) begun_.clear();
  Begun& begun = begun_[{name.run, name.job, rank}];
  if (!begun.attempts.empty() && name.attempt <= begun.last()) return false;
  begun.attempts.emplace(name.attempt, step);
  if (begun.attempts.size() > kRememberedAttempts) begun.attempts.erase(begun.attempts.begin());
  if (!begun.first && !again) begun.first = name.attempt;
  std::vector<std::pair<AttemptName, uint64_t>> before;
  for (const auto& [other, open] : open_) {
    if (IsOf(other, name) && other.attempt < name.attempt) {
      before.emplace_back(other, open.step);
    }
  }
  for (const auto& [other, passed] : before) DropPassed(other, passed);
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

std::map<uint32_t, const IncomingSteps::Begun*> IncomingSteps::BegunOf(const AttemptName& of) const {
  std::map<uint32_t, const Begun*> found;
  for (auto at = begun_.lower_bound({of.run, of.job, 0}); at != begun_.end(); ++at) {
    const auto& [run, job, rank] = at->first;
    if (run != of.run || job != of.job) break;
    if (!at->second.attempts.empty()) found.emplace(rank, &at->second);
  }
  return found;
}

std::set<uint32_t> IncomingSteps::PassedBy(const AttemptName& name) const {
  std::set<uint32_t> ranks;
  for (const auto& [rank, begun] : BegunOf(name)) {
    const auto& first = begun->first;
    if (!first || name.attempt < std::max(*first, begun->attempts.begin()->first)) continue;
    if (name.attempt > begun->last() || begun->Has(name)) continue;
    ranks.insert(rank);
  }
  return ranks;
}

void IncomingSteps::DropIf(const AttemptName& job, const std::string& why,
                           const std::function<bool(const AttemptName&, const Open&)>& of) {
  std::vector<std::pair<AttemptName, uint64_t>> found;
  for (const auto& [name, open] : open_) {
    if (IsOf(name, job) && of(name, open)) found.emplace_back(name, open.step);
  }
  for (const auto& [name, step] : found) Drop(name, step, why);
}

// Drops it so that a rank that tries again alone does not keep its arena full for nothing.
void IncomingSteps::DropEarlierSave(const AttemptName& name, uint64_t step, uint32_t rank) {
  const auto begun = BegunOf(name);
  const auto ranks = lives_of_jobs_.RanksOf(name.run, name.job);
  DropIf(name, StrCat("rank ", rank, " saved it again"), [&](const AttemptName& other, const Open& open) {
    if (open.step != step || other.attempt >= name.attempt || !begun.at(rank)->Has(other)) return false;
    return !std::ranges::all_of(ranks, [&](uint32_t one) {
      const auto at = begun.find(one);
      return at != begun.end() && at->second->Has(other);
    });
  });
}

// A rank in a later turn has gone back, and the other one has not:
// it missed a save, say.  Their saves from now on would never meet.
void IncomingSteps::DropApart(const AttemptName& name, uint64_t step, uint32_t rank) {
  const auto begun = BegunOf(name);
  const Begun& mine = *begun.at(rank);
  const uint64_t turn = TurnOf(name.attempt);
  std::vector<AttemptName> apart;
  for (const auto& [other, theirs] : begun) {
    const uint64_t their_turn = TurnOf(theirs->last());
    if (their_turn == turn) continue;
    const bool later = their_turn > turn;
    const Begun& ahead = later ? *theirs : mine;
    const Begun& behind = later ? mine : *theirs;
    // The attempt that the rank behind is at now.
    const AttemptName low{name.run, name.job, behind.last()};
    if (behind.attempts.rbegin()->second != step || ahead.Has(low)) continue;
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
  const bool busy = std::ranges::any_of(kept_, [&](const AttemptName& name) { return IsOf(name, job); });
  CKPT_ASSIGN_OR_RETURN(const auto strangers, lives_of_jobs_.Greet(who, how, born, busy));
  const size_t before = dropped_.size();
  if (strangers.all) {
    DropIf(job, "another life of its job began", [](auto&, auto&) { return true; });
    ForgetLife({who.run, who.job});
    renewed_.emplace(who.run, who.job);
  }
  for (const uint32_t rank : strangers.ranks) {
    DropIf(job, StrCat("rank ", rank, " had gone when rank ", who.rank, "'s process began"),
           [&](auto&, const Open& open) { return open.files.contains(rank); });
    begun_.erase({who.run, who.job, rank});
  }
  if (!strangers.ranks.empty()) {
    ForgetDrops(job);  // its own saves may have the same names
  }
  for (size_t i = before; i < dropped_.size(); ++i) dropped_[i].earlier = true;
  ++greetings_;
  return {};
}

bool IncomingSteps::End(const std::vector<RankOfJob>& ranks) {
  for (const RankOfJob& who : ranks) {
    lives_of_jobs_.End(who);
    DropOfEnded({who.run, who.job});
  }
  return !ranks.empty();
}

// Leaves what an earlier daemon was told: it may be stored already, and is looked for.
void IncomingSteps::DropOfEnded(const AttemptName& job) {
  for (const uint32_t rank : lives_of_jobs_.Ended(job.run, job.job)) {
    DropIf(job, StrCat("rank ", rank, "'s process ended before it handed its part over"),
           [&](const AttemptName&, const Open& open) {
             const bool again = std::ranges::any_of(open.files, [](auto& one) { return one.second.again; });
             return rank < open.world && !again && !open.files.contains(rank) && !open.taken.contains(rank);
           });
  }
}

void IncomingSteps::Refuse(const RankOfJob& who, uint64_t attempt, const std::string& why) {
  if (attempt == 0 || !lives_of_jobs_.MayBeOf(who)) return;
  Cancel({who.run, who.job, attempt}, StepOf(attempt), who.rank, why);
}

void IncomingSteps::DropLeftBehind() {
  std::set<JobLives::JobName> jobs;
  for (const auto& [name, open] : open_) {
    if (lives_of_jobs_.AllEnded(name.run, name.job)) jobs.emplace(name.run, name.job);
  }
  for (const auto& [run, job] : jobs) {
    DropIf({run, job}, "all ranks that were here have ended, and others need the memory",
           [](const AttemptName&, const Open& open) { return open.taken.empty(); });
  }
}

void IncomingSteps::ForgetLife(const JobLives::JobName& job) {
  const AttemptName of{job.first, job.second};
  ForgetDrops(of);
  std::erase_if(begun_, [&](const auto& one) {
    return std::get<0>(one.first) == of.run && std::get<1>(one.first) == of.job;
  });
}

void IncomingSteps::ForgetDrops(const AttemptName& job) {
  std::erase_if(gone_, [&](const auto& one) { return IsOf(one.first, job); });
  std::erase_if(gone_in_order_, [&](const AttemptName& name) { return IsOf(name, job); });
}

void IncomingSteps::ForgetJobs() {
  std::set<JobLives::JobName> used;
  for (const auto& [name, open] : open_) used.emplace(name.run, name.job);
  for (const AttemptName& name : kept_) used.emplace(name.run, name.job);
  for (const auto& [name, why] : gone_) used.emplace(name.run, name.job);
  for (const auto& job : lives_of_jobs_.Forget(used)) ForgetLife(job);
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
  const std::set<uint32_t> ranks = PassedBy(name);
  if (ranks.empty()) return;
  Drop(name, step,
       StrCat(ranks.size() == 1 ? "rank " : "ranks ", RanksText(ranks), " went on without it"));
}

std::vector<IncomingSteps::Waiting> IncomingSteps::waiting() const {
  std::vector<Waiting> found;
  for (const auto& [name, open] : open_) {
    Waiting one{name, open.step, open.world, {}, open.taken};
    for (const auto& [rank, file] : open.files) one.ended.insert(rank);
    found.push_back(std::move(one));
  }
  return found;
}

IncomingSteps::Part IncomingSteps::Take(const AttemptName& name) {
  Open& open = open_.at(name);
  for (const auto& [rank, file] : open.files) open.taken.insert(rank);
  kept_.insert(name);
  return {open.first, std::exchange(open.files, {})};
}

void IncomingSteps::DropOlder(Time limit, const Elsewhere& elsewhere) {
  std::vector<DroppedStep> found;
  for (const auto& [name, open] : open_) {
    if (open.first >= limit || open.files.empty()) continue;
    std::set<uint32_t> missing;
    for (uint32_t rank = 0; rank < open.world; ++rank) {
      if (!open.files.contains(rank) && !open.taken.contains(rank)) missing.insert(rank);
    }
    if (elsewhere) {
      for (const uint32_t rank : elsewhere(name)) missing.erase(rank);
    }
    found.push_back({name, open.step, StrCat("nothing came from rank ", RanksText(missing))});
  }
  for (const DroppedStep& one : found) Drop(one.name, one.step, one.why);
}

std::vector<DroppedStep> IncomingSteps::TakeDropped() { return std::exchange(dropped_, {}); }

}  // namespace ckptfs
