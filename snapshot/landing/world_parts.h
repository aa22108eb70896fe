// SPDX-License-Identifier: Apache-2.0
//
// WorldParts is what a receiver does with steps of which it has only some ranks: it finds out
// which daemons have the others, makes its own part durable, and tells what became of the
// step (core/commit/world_commit.h).  Parts are made durable in the order in which they
// were handed over; a store that fails is tried again.
//
// Thread safety: all methods may be called concurrently.  One thread of its own, which
// alone speaks to the store and calls what the options name.
// Lifetime: the destructor makes what was handed over durable, if that can be at once; it is then
// for other daemons to make it a step.
// Units: bytes.

#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "snapshot/landing/received_step.h"
#include "snapshot/landing/spooler.h"

namespace ckptfs {

struct WorldPart {
  AttemptName name;  // without the life
  uint64_t step = 0;
  uint32_t world = 0;
  std::map<uint32_t, ReceivedFile> files;
  IncomingSteps::Time first;             // when the first of them came
  std::shared_ptr<SaveBytes> save = {};  // has the files' bytes, which these then lack
  bool begun = false;                    // the store has met it
};

struct WorldPartsOptions {
  WorldCommit* commit = nullptr;  // must outlive it
  std::chrono::milliseconds patience{600'000};
  std::chrono::milliseconds turn{500};  // between looks at the store
  // Called with what became of a part that was handed over; the name has the life if it is known.
  std::function<void(const AttemptName& name, uint64_t step, const Status& done)> settled;
  // Called when a step is durable; `published`: by this daemon.
  std::function<void(const StepRecord& record, bool published)> stored;
  std::function<void()> reclaim;  // something was written in vain, or another daemon left it
  std::function<void()> wake;     // more is known of a job than before
  Spooler* spooler = nullptr;     // has the parts that come with a save
  // True if a part that an earlier daemon may have prepared is in a step already.  May be empty.
  std::function<Result<bool>(const PreparedPart& part)> found = {};
  std::function<void(std::string_view line)> log;
};

class WorldParts {
 public:
  explicit WorldParts(WorldPartsOptions options);
  ~WorldParts();

  // Its thread ends; what is here stays, and may be asked about.  BLOCKS: on what it does.
  // REQUIRES: one thread.
  void Stop();

  // Notes that a step waits for ranks that are not here; these are, or were.
  void See(const NodeRanks& mine);
  // Returns what is known of a job that was seen; an error if its ranks cannot make a step.
  Result<JobWorld> WorldOf(const std::string& run, const std::string& job) const;
  void Hand(WorldPart part);
  // Drops a step of a job that was seen, for the ranks of other daemons, too.
  void Drop(const DroppedStep& step);
  // True if an attempt is here whose outcome will be told.
  bool Has(const AttemptName& name) const;
  // Notes that none of its ranks is here any more, and no step of it waits.
  void Leave(const std::string& run, const std::string& job);

  // "run/7: waiting for ranks 2-3", for each that is handed over.
  std::vector<std::string> Waiting() const;

 private:
  using Clock = std::chrono::steady_clock;
  using JobName = std::pair<std::string, std::string>;
  struct Job {
    NodeRanks mine;
    bool changed = true;
    Result<JobWorld> world = JobWorld();
    bool leaves = false;
    std::optional<Clock::time_point> told;  // of the last drop, to daemons that may not know us yet
  };
  struct Pending {
    // A daemon that does not have rank 0 looks every turn whether a save is decided, and only
    // after so many turns at all parts of it, then twice as seldom each time.
    static constexpr int kFirstLook = 10;
    static constexpr int kMostTurns = 40;
    AttemptName name;  // with the life
    uint64_t step = 0;
    Clock::time_point first;
    bool has_first_rank = false;
    int turns = 0;               // in which it was waited for the daemon with rank 0
    int next_look = kFirstLook;  // at all parts of it: in that turn
    std::set<uint32_t> missing = {};
    std::shared_ptr<SaveBytes> save = {};  // in the spool, until it is settled
    // It may have become a step, and that may have been forgotten, before our record was there:
    // nothing if that was looked for since.
    std::optional<PreparedPart> again = {};
  };

  void Run();
  void Turn();
  void JoinAll();
  void PrepareAll();
  // False: try again later.
  bool Prepare(WorldPart& part);
  // True if an earlier daemon may have prepared it.
  bool IsAgain(const WorldPart& part) const;
  // True if it is in a step already; else it is prepared.
  Result<bool> WriteDown(WorldPart& part, const PreparedPart& prepared);
  bool stopping() const;
  void DropAll();
  void LookAtAll();
  // True if it was one already, or the store does not say so far.
  bool MayBeStep(Pending& pending, AttemptNews& news);
  Result<std::optional<AttemptNews>> NewsOf(Pending& pending);
  bool LookAt(Pending& pending);
  // Drops our part if other machines' ranks saved the step in a later turn, and tells our ranks.
  bool DropApart(const Pending& pending, const std::map<uint64_t, uint64_t>& later);
  void LeaveAll();
  void Settle(const AttemptName& name, uint64_t step, const Status& done,
              const std::shared_ptr<SaveBytes>& save);
  bool Late(Clock::time_point first) const { return Clock::now() - first >= options_.patience; }
  void Say(const std::string& line) const;

  const WorldPartsOptions options_;
  mutable Mutex mutex_;
  CondVar moved_;
  std::map<JobName, Job> jobs_ GUARDED_BY(mutex_);
  std::deque<WorldPart> handed_ GUARDED_BY(mutex_);
  std::deque<std::pair<DroppedStep, Clock::time_point>> dropped_ GUARDED_BY(mutex_);
  std::vector<Pending> pending_ GUARDED_BY(mutex_);          // changed by its thread only
  std::string handing_ GUARDED_BY(mutex_);                   // the step that is being made durable
  std::optional<AttemptName> preparing_ GUARDED_BY(mutex_);  // the same
  bool asked_ GUARDED_BY(mutex_) = false;
  bool stopping_ GUARDED_BY(mutex_) = false;
  Clock::time_point finished_{};  // its thread's: when it last looked at what others left
  std::string said_;              // its thread's: the last failure that was logged
  std::thread thread_;
};

}  // namespace ckptfs
