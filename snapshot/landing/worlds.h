// SPDX-License-Identifier: Apache-2.0
//
// Worlds has the jobs of which this daemon has some ranks and other daemons the others: it says
// which ranks are here, finds out which are elsewhere, and tells the others of steps that are
// dropped (core/commit/world_commit.h).
//
// Thread safety: JoinAll, DropAll and LeaveAll by the one thread that speaks to the store about
// steps of several daemons; all others by any.
// Lifetime: the commit must outlive it.

#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "snapshot/landing/job_lives.h"
#include "snapshot/landing/received_step.h"

namespace ckptfs {

class Worlds {
 public:
  using JobName = JobLives::JobName;
  using Log = std::function<void(std::string_view line)>;
  // `patience`: for daemons that are not known yet.
  Worlds(WorldCommit& commit, std::chrono::milliseconds patience, Log log)
      : commit_(commit), patience_(patience), log_(std::move(log)) {}

  // Notes that a step waits for ranks that are not here; these are, or were.  True if that is news.
  bool See(const NodeRanks& mine);
  // Returns what is known of a job that was seen; an error if its ranks cannot make a step.
  Result<JobWorld> WorldOf(const std::string& run, const std::string& job) const;
  // Drops a step of a job that was seen, for the ranks of other daemons, too.
  void Drop(const DroppedStep& step);
  // Notes that none of a job's ranks is here any more, and no step of it waits.
  void Leave(const std::string& run, const std::string& job);

  // Asks for the worlds of jobs that were seen.  True if more is known than before.
  bool JoinAll();
  void DropAll();
  // Forgets jobs that were left, unless one of `busy`.
  void LeaveAll(const std::set<JobName>& busy);

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    NodeRanks mine;
    bool changed = true;
    Result<JobWorld> world = JobWorld();
    bool leaves = false;
    std::optional<Clock::time_point> told;  // of the last drop, to daemons that may not know us yet
  };
  bool Late(Clock::time_point since) const { return Clock::now() - since >= patience_; }

  WorldCommit& commit_;
  const std::chrono::milliseconds patience_;
  const Log log_;
  mutable Mutex mutex_;
  std::map<JobName, Job> jobs_ GUARDED_BY(mutex_);
  std::deque<std::pair<DroppedStep, Clock::time_point>> dropped_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
