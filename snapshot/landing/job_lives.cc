// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/job_lives.h"

#include <algorithm>

#include "core/base/strings.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

// Ranks of one job that one daemon is told of: what is looked at for each of them ends here.
constexpr size_t kMostRanks = 4096;
constexpr std::string_view kRule = "; give each life of a job a `job` text of its own";

// A rank that comes now would be told of that step as if it were its own.
tl::unexpected<Error> StillWritten() {
  return Fail(ErrorCode::kExists, StrCat("a step of an earlier life of the job is still being "
                                         "written",
                                         kRule));
}

}  // namespace

bool IsOwnJob(const std::string& job) { return job.starts_with(kOwnJob); }

Result<JobLives::Strangers> JobLives::Greet(const RankOfJob& who, Comes how,
                                            std::optional<Time> born, bool busy) {
  Strangers strangers;
  Job& job = jobs_[{who.run, who.job}];
  const auto known = job.ranks.find(who.rank);
  const bool fresh = known == job.ranks.end();
  const bool other =
      !job.ranks.empty() && (job.world != who.world || (!fresh && known->second.life != who.life));
  if (other) {
    for (const auto& [number, rank] : job.ranks) {
      if (rank.here == 0) continue;
      return Fail(ErrorCode::kExists,
                  job.world == who.world
                      ? StrCat("rank ", number,
                               " of another life of the job is still at "
                               "work",
                               kRule)
                      : StrCat("the job has ", job.world, " ranks, not ", who.world, kRule));
    }
    if (how == Comes::kForAnother)
      return Fail(ErrorCode::kStale,
                  "another life of the job has "
                  "begun");
    if (busy) return StillWritten();
    strangers.all = true;
    job.ranks.clear();
  } else if (fresh && !IsOwnJob(who.job)) {
    for (const auto& [number, rank] : job.ranks) {
      if (how == Comes::kForAnother && rank.fresh) {
        return Fail(ErrorCode::kStale, StrCat("rank ", number,
                                              " has connected and may belong to "
                                              "another life",
                                              kRule));
      }
      const bool gone = rank.here == 0 && (!born || rank.seen < *born);
      if (how == Comes::kNew && gone) strangers.ranks.insert(number);
    }
    if (busy && !strangers.ranks.empty()) return StillWritten();
    for (const uint32_t rank : strangers.ranks) job.ranks.erase(rank);
  }
  if (fresh && job.ranks.size() >= kMostRanks) {
    return Fail(ErrorCode::kInvalid,
                StrCat("more than ", kMostRanks, " ranks of one job on one machine"));
  }
  job.world = who.world;
  Rank& rank = job.ranks[who.rank];
  rank.fresh = rank.fresh || (fresh && how == Comes::kNew);
  rank.life = who.life;
  rank.ended = false;
  ++(how == Comes::kForAnother ? rank.spoken_for : rank.here);
  return strangers;
}

bool JobLives::Leave(const RankOfJob& who, Comes how, Time seen) {
  const auto job = jobs_.find({who.run, who.job});
  if (job == jobs_.end()) return false;
  const auto at = job->second.ranks.find(who.rank);
  if (at == job->second.ranks.end() || at->second.life != who.life) return false;
  Rank& rank = at->second;
  if (how == Comes::kForAnother) {
    --rank.spoken_for;
  } else {
    --rank.here;
    rank.seen = std::max(rank.seen, seen);
  }
  return rank.Gone();
}

bool JobLives::End(const RankOfJob& who) {
  const auto job = jobs_.find({who.run, who.job});
  if (job == jobs_.end()) return false;
  const auto at = job->second.ranks.find(who.rank);
  if (at == job->second.ranks.end() || at->second.life != who.life) return false;
  at->second.ended = true;
  return at->second.Gone();
}

std::set<uint32_t> JobLives::Ended(const std::string& run, const std::string& job) const {
  std::set<uint32_t> ranks;
  const auto found = jobs_.find({run, job});
  if (found == jobs_.end()) return ranks;
  for (const auto& [number, rank] : found->second.ranks) {
    if (rank.Gone()) ranks.insert(number);
  }
  return ranks;
}

bool JobLives::AllEnded(const std::string& run, const std::string& job) const {
  const auto found = jobs_.find({run, job});
  return found != jobs_.end() && Ended(run, job).size() == found->second.ranks.size();
}

bool JobLives::MayBeOf(const RankOfJob& who) const {
  const auto found = jobs_.find({who.run, who.job});
  if (found == jobs_.end()) return true;
  const auto& ranks = found->second.ranks;
  const auto rank = ranks.find(who.rank);
  const bool here =
      std::any_of(ranks.begin(), ranks.end(), [](auto& one) { return one.second.here > 0; });
  const bool same = rank == ranks.end() ? here || IsOwnJob(who.job) : rank->second.life == who.life;
  return same && found->second.world == who.world;
}

void JobLives::Meet(const std::string& run, const std::string& job) {
  const auto found = jobs_.find({run, job});
  if (found == jobs_.end()) return;
  for (auto& [number, rank] : found->second.ranks) rank.met = rank.met || rank.here > 0;
}

bool JobLives::HasMet(const std::string& run, const std::string& job, uint32_t rank) const {
  if (IsOwnJob(job)) return true;
  const auto found = jobs_.find({run, job});
  if (found == jobs_.end()) return false;
  const auto at = found->second.ranks.find(rank);
  return at != found->second.ranks.end() && at->second.met;
}

std::set<uint32_t> JobLives::RanksOf(const std::string& run, const std::string& job) const {
  std::set<uint32_t> ranks;
  const auto found = jobs_.find({run, job});
  if (found == jobs_.end()) return ranks;
  for (const auto& [number, rank] : found->second.ranks) ranks.insert(number);
  return ranks;
}

std::set<JobLives::JobName> JobLives::Forget(const std::function<bool(const JobName&)>& used) {
  std::set<JobName> gone;
  for (auto at = jobs_.begin(); at != jobs_.end();) {
    const bool here = std::any_of(at->second.ranks.begin(), at->second.ranks.end(), [](auto& one) {
      return one.second.here + one.second.spoken_for > 0;
    });
    if (here || used(at->first)) {
      ++at;
      continue;
    }
    gone.insert(at->first);
    at = jobs_.erase(at);
  }
  return gone;
}

}  // namespace ckptfs
