// SPDX-License-Identifier: Apache-2.0
//
// ReceivedStep is what all ranks of a job handed over of one step: a file per rank, as
// spans of arenas.  IncomingSteps puts the ranks' parts together: a step is there when
// every rank of the world has ended its part of the same attempt, and parts of
// different attempts, or of different lives of a job, never meet.
//
// Thread safety: IncomingSteps: none; its owner's thread.
// Lifetime: the bytes of a file stay while its lease does.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/records/commit_records.h"
#include "snapshot/landing/job_lives.h"
#include "snapshot/landing/rank_ranges.h"

namespace ckptfs {

struct ReceivedFile {
  uint64_t bytes = 0;
  std::vector<std::span<const std::byte>> rope;
  std::vector<Digest> chunks;  // of every kChunkBytes (core/blob/chunk_digests.h)
  bool again = false;          // handed over before, to a daemon that may have stored the step
  std::shared_ptr<const void> lease;
  // Called before the lease goes, if a disk of this node has the file at `place`.  May be empty.
  std::function<void(const std::string& place)> shelve = {};
  uint64_t unproved = 0;  // bytes of which a write could have gone unseen (save_proof.h)
};

struct ReceivedStep {
  AttemptName name;
  uint64_t step = 0;
  std::vector<ReceivedFile> files;  // by rank
  Digest life = {};                 // IncomingSteps::LifeOf
};

// The part of a step that this daemon's ranks handed over: all of it, where it has all ranks.
struct ReceivedPart {
  AttemptName name;  // with the life
  uint64_t step = 0;
  uint32_t world = 0;
  std::map<uint32_t, ReceivedFile> files;       // by rank
  std::chrono::steady_clock::time_point first;  // when the first of them came
};

// A step of which all ranks are here is the part of a world of one daemon.
ReceivedPart PartOf(ReceivedStep step);

// A part of a step that was handed over before, to another daemon.
struct PartAgain {
  AttemptName name;
  uint64_t step = 0;
  uint32_t rank = 0;
  uint32_t world = 0;
  ReceivedFile file;       // without its bytes
  bool over = false;       // this daemon has had it already: the step is stored or dropped
  std::string place = {};  // the rank asks about what lay there, and nothing else
  uint64_t asker = 0;      // RankSession::number
};

// A step that will never be whole, and why.
struct DroppedStep {
  AttemptName name;
  uint64_t step = 0;
  std::string why;
  bool again = false;      // said before; a rank ended its part only now
  uint64_t greetings = 0;  // before it: ranks that came later may have other saves of that name
  bool earlier = false;    // of an earlier life of its job
};

// DroppedStep::why: some ranks went back where others did not.
// Those others must now go on in the later turn (protocol.h), too.
inline constexpr std::string_view kApart = "its ranks went back to different steps";

class IncomingSteps {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Takes in a rank that speaks to this daemon from now on.  Drops what is open of
  // its job with ranks that are not of its life.  Errors as of JobLives::Greet.
  Status Greet(const RankOfJob& who, JobLives::Comes how, std::optional<JobLives::Time> born);
  // Returns the number of the last rank that came, counted from 1.
  uint64_t greetings() const { return greetings_; }
  void Leave(const RankOfJob& who, JobLives::Comes how, JobLives::Time seen);
  // Notes that processes of ranks that left have ended.  Drops what lacks their
  // parts, now and later: it never becomes whole.  True if `ranks` is not empty.
  bool End(const std::vector<RankOfJob>& ranks);
  // Drops this attempt for all: the daemon did not take in a rank that wanted to save it.
  void Refuse(const RankOfJob& who, uint64_t attempt, const std::string& why);
  // Drops what is not whole of jobs whose ranks have all ended: others need the memory.
  void DropLeftBehind();
  // Notes that the ranks that other daemons have are known.
  void Meet(const AttemptName& of) { lives_of_jobs_.Meet(of.run, of.job); }
  // Drops an attempt with ranks that left before those of other daemons were known.
  bool DropUnmet(const AttemptName& name);
  // Forgets jobs of which nobody is here and nothing is open or being stored.
  void ForgetJobs();
  // Jobs that began another life since the last call.
  std::set<JobLives::JobName> TakeRenewed() { return std::exchange(renewed_, {}); }

  // Notes that `rank` has ended its part.  Returns the step if that was the last part.
  std::optional<ReceivedStep> Add(const AttemptName& name, uint64_t step, uint32_t rank,
                                  uint32_t world, ReceivedFile file, Time now);
  // A step whose ranks have not all ended their part.
  struct Waiting {
    uint64_t step = 0;
    uint32_t world = 0;
    const RankRanges* here = nullptr;  // ranks that have ended, taken or not; while it waits
    bool untaken = false;              // a part is here that was not taken
  };
  // Nothing if it does not wait.
  std::optional<Waiting> Find(const AttemptName& name) const;
  // Returns the attempts that a part came of, or that wait no more, since the last call.
  std::set<AttemptName> TakeMoved() { return std::exchange(moved_, {}); }
  // Returns the attempts of a job that wait, oldest first.
  std::vector<AttemptName> OpenOf(const std::string& run, const std::string& job) const;
  bool HasOpen(const std::string& run, const std::string& job) const;
  // Takes the parts that have ended, to be put together with those
  // that other daemons receive.  Ranks may still end theirs.
  struct Part {
    Time first;
    std::map<uint32_t, ReceivedFile> files;
  };
  Part Take(const AttemptName& name);
  // Drops an attempt for all ranks, also for those that end their part later.
  void Drop(const AttemptName& name, uint64_t step, const std::string& why);
  // Notes that it is stored already, or never will be: nothing more is expected of it.
  void Forget(const AttemptName& name);
  // Notes that it is being stored, from what an earlier daemon left.
  void Keep(const AttemptName& name) { kept_.insert(name); }
  // True if `rank` has begun neither this attempt nor a later one before.  `again`: it
  // may have begun others with an earlier daemon, which it does not name again.  Drops
  // the attempts that `rank` passes over between two that it begins here: they never
  // come.  Drops what `rank` saved of the same step before, unless all ranks have
  // begun that.  Drops what another rank saved of that step in another turn (kApart).
  bool Begin(const AttemptName& name, uint64_t step, uint32_t rank, bool again);
  // Drops the save of `rank`, begun or not.  Also drops
  // what another rank saved of the step in another turn.
  void Cancel(const AttemptName& name, uint64_t step, uint32_t rank, const std::string& why);
  // True if it was dropped, not long ago.
  bool IsGone(const AttemptName& name) const { return gone_.contains(name); }
  // Returns a random number for the names of an attempt's files, while no other
  // life of its job is known, until it is whole or over.  REQUIRES: !IsGone(name).
  Digest LifeOf(const AttemptName& name);
  // Drops those that were not taken and whose first part came before `limit`, some at a time.
  // The reason names the missing ranks, but for those that `elsewhere` has.  True if there are
  // more.
  using Elsewhere = std::function<std::set<uint32_t>(const AttemptName& name)>;
  bool DropOlder(Time limit, const Elsewhere& elsewhere = {});

  // Returns what was dropped since the last call.
  std::vector<DroppedStep> TakeDropped();
  size_t size() const { return open_.size(); }

 private:
  struct Open {
    uint64_t step = 0;
    uint32_t world = 0;
    Time first;
    std::map<uint32_t, ReceivedFile> files = {};
    RankRanges here = {};  // the files' ranks, and those whose files were taken
  };
  using OpenSteps = std::map<AttemptName, Open>;
  // The attempts that a rank has begun: the newest kRememberedAttempts of them.
  struct Begun {
    std::optional<uint64_t> first = {};          // that was not begun with an earlier daemon
    std::map<uint64_t, uint64_t> attempts = {};  // and their steps
    bool Has(uint64_t attempt) const { return attempts.contains(attempt); }
    uint64_t last() const { return attempts.rbegin()->first; }
    // True if it began attempts before and after this one here, but not this one.
    bool Passes(uint64_t attempt) const;
  };
  struct JobBegun {
    std::map<uint32_t, Begun> ranks;     // each has begun something
    std::map<uint64_t, uint32_t> turns;  // how many of them are in which turn
  };
  // An attempt that was dropped lately, and why.
  struct Gone {
    std::string why;
    uint64_t number = 0;  // in the order of the drops
  };

  const JobBegun& BegunOf(const AttemptName& job) const;
  // Notes that a rank has begun an attempt, its last one.
  Begun& Note(const AttemptName& name, uint64_t step, uint32_t rank);
  void ForgetBegun(const AttemptName& job, uint32_t rank);
  void DropPassed(const AttemptName& name, uint64_t step);
  void DropEarlierSave(const AttemptName& name, uint64_t step, uint32_t rank);
  void DropApart(const AttemptName& name, uint64_t step, uint32_t rank);
  // Drops what lacks the part of a rank that has ended.
  void DropOfEnded(const AttemptName& job, uint32_t rank);
  // True if it lacks the part of that rank, and no earlier daemon was told of it.
  static bool Lacks(const Open& open, uint32_t rank);
  // Drops the open attempts of a job for which `of` is true.
  void DropIf(const AttemptName& job, const std::string& why,
              const std::function<bool(const AttemptName& name, const Open& open)>& of);
  void Close(const AttemptName& name);
  void ForgetLife(const AttemptName& job);
  void ForgetDrops(const AttemptName& job);

  OpenSteps open_;
  std::set<std::pair<Time, AttemptName>> by_age_;  // of the open ones with files
  std::set<AttemptName> moved_;                    // TakeMoved
  std::map<AttemptName, Digest> lives_;
  std::map<AttemptName, Gone> gone_;
  std::map<uint64_t, AttemptName> gone_in_order_;
  uint64_t drops_ = 0;
  std::map<JobLives::JobName, JobBegun> begun_;
  size_t begun_ranks_ = 0;  // in it
  std::vector<DroppedStep> dropped_;
  uint64_t greetings_ = 0;
  std::set<AttemptName> kept_;  // whole or taken, and not forgotten
  JobLives lives_of_jobs_;
  std::set<JobLives::JobName> renewed_;
};

}  // namespace ckptfs
