// SPDX-License-Identifier: Apache-2.0
//
// JobLives knows which ranks of each job are here, or were, and of which life their processes
// are.  So no step is put together out of two lives of a job that share one text.  A life is
// a random number of each process: two ranks that were never seen before may be of two lives.
// The times of their processes tell: one that began when another had gone is not of its life.
//
// Thread safety: none; the receiver's thread.
// Units: times are since boot.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/base/result.h"

namespace ckptfs {

struct RankOfJob {
  std::string run;
  std::string job;
  uint32_t rank = 0;
  uint32_t world = 0;
  uint64_t life = 0;
};

class JobLives {
 public:
  using Time = std::chrono::nanoseconds;
  // kBack: it repeats what it told an earlier daemon.  kForAnother: another process repeats it.
  enum class Comes { kNew, kBack, kForAnother };

  // Ranks of the previous life.  Their unfinished steps must not be joined with this life's.
  struct Strangers {
    bool all = false;  // of the job, which begins another life
    std::set<uint32_t> ranks;
  };
  // Takes a rank in.  `born`: when its process began, if known.  `busy`: a step of the job is
  // being stored.  kExists if such a step, or a process of another life of the job, is still
  // at work: it may come later.  kStale for messages on behalf of a rank of an earlier life.
  // kInvalid for more ranks of one job than a machine has.
  Result<Strangers> Greet(const RankOfJob& who, Comes how, std::optional<Time> born, bool busy);
  // Notes that a rank left.  `seen`: when its process was known to be there.  True if it
  // comes no more (Ended).
  bool Leave(const RankOfJob& who, Comes how, Time seen);
  // Notes that its process has ended, after it left.  As Leave.
  bool End(const RankOfJob& who);
  // Returns the ranks that come no more: their processes have ended, and nobody speaks for them.
  std::set<uint32_t> Ended(const std::string& run, const std::string& job) const;
  // True if all ranks of the job that came have ended so.
  bool AllEnded(const std::string& run, const std::string& job) const;
  // True if the rank is of the known life of its job, as far as that can be told.
  bool MayBeOf(const RankOfJob& who) const;
  // Notes that all ranks of the job's world are known, also those that
  // other daemons have.  Ranks that are here now are of their life.
  void Meet(const std::string& run, const std::string& job);
  // True if the rank was here when Meet was called.
  bool HasMet(const std::string& run, const std::string& job, uint32_t rank) const;
  // Returns the ranks of the job that greeted.
  std::set<uint32_t> RanksOf(const std::string& run, const std::string& job) const;
  // Forgets jobs of which nobody is here and that are not `used`.
  using JobName = std::pair<std::string, std::string>;  // run, job
  std::set<JobName> Forget(const std::function<bool(const JobName&)>& used);

 private:
  struct Rank {
    uint64_t life = 0;
    int here = 0;  // conversations
    int spoken_for = 0;
    Time seen{0};  // for a rank that has left
    bool met = false;
    bool fresh = false;  // it came kNew
    bool ended = false;  // its process, when it left
    bool Gone() const { return ended && here == 0 && spoken_for == 0; }
  };
  struct Job {
    uint32_t world = 0;
    std::map<uint32_t, Rank> ranks;
  };
  std::map<JobName, Job> jobs_;
};

// True if a job's text was made for one life alone.
bool IsOwnJob(const std::string& job);

}  // namespace ckptfs
