// SPDX-License-Identifier: Apache-2.0
//
// Landing owns the saves that a daemon has whole, from the last rank's part on until they are
// durable or dropped.  A save has one state, and TransitionOf (landing_state.h) is all that may
// happen to it.  Three hands do what is next: one enters and persists saves of which all ranks are
// here, in order; one enters those that wait behind others, where there is a spool to let them wait
// in; one speaks to the store about saves of which other daemons have ranks.  What fails is tried
// again by one rule (retry_rule.h).
//
// Thread safety: all methods may be called concurrently; Start, StopWorlds and Finish by one
// thread.  Each hand is a thread; they alone call the options' objects.
// Lifetime: what the options name must outlive it.  The destructor finishes what is here, as
// StopWorlds and Finish do.
// Units: bytes.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/base/worker.h"
#include "core/commit/world_commit.h"
#include "snapshot/landing/landing_state.h"
#include "snapshot/landing/landing_status.h"
#include "snapshot/landing/protector.h"
#include "snapshot/landing/question_queue.h"
#include "snapshot/landing/received_step.h"
#include "snapshot/landing/retry_rule.h"
#include "snapshot/landing/spooler.h"
#include "snapshot/landing/step_maker.h"
#include "snapshot/landing/worlds.h"

namespace ckptfs {

struct LandingOptions {
  StepMaker* steps = nullptr;
  // How steps are made with the ranks of other daemons; null: they are not.
  WorldCommit* commit = nullptr;
  Spooler* spooler = nullptr;  // where saves may wait for the store; null: in memory
  std::chrono::milliseconds patience{600'000};  // with the ranks of other daemons
  std::chrono::milliseconds turn{500};          // between looks at what became of such saves
  RetryRule retry = {};
  std::function<void(std::string_view line)> log = {};
};

class Landing {
 public:
  explicit Landing(LandingOptions options);
  ~Landing();
  Landing(const Landing&) = delete;
  Landing& operator=(const Landing&) = delete;

  // Begins, with what an earlier daemon left in the spool.
  Status Start();
  // Returns the attempts that are here.
  std::vector<AttemptName> names() const;

  // ---- what ranks have handed over
  void Take(ReceivedPart part);
  // The same of a save whose files are together.  `first`: when the first of them came.
  void Take(std::shared_ptr<SaveBytes> save, std::chrono::steady_clock::time_point first);
  // Notes that a save was dropped before it was whole.
  void NoteDrop(const std::string& line);
  // Gives what it takes to other daemons' memory, too; null: no more.
  void ProtectBy(Protector* protector) { protector_ = protector; }
  // StepMaker::Stream, unless a save waits that may go to the spool: its store would be slower.
  std::shared_ptr<BlobStream> Stream(PreparedPart part, std::weak_ptr<const void> owner);

  // ---- what ranks ask of saves that an earlier daemon had
  void Ask(std::vector<PartAgain> questions);
  // As QuestionQueue::ForgetOver.
  std::vector<AttemptName> ForgetOver(uint64_t asker);
  // True if it is being looked for, or TakeNews will have what became of it.
  bool MayBeOver(const AttemptName& name) const;

  // ---- what became of them
  struct Outcome {
    AttemptName name;  // without the life
    uint64_t step = 0;
    Status done;
    std::string place = {};  // where its files lie, below the store's blobs; empty: not known
  };
  struct News {
    std::vector<Outcome> over;
    std::vector<std::pair<uint64_t, AttemptName>> answered;  // by asker
  };
  News TakeNews();
  // True if more is known of a job of several daemons than at the last call.
  bool TakeWorldsMoved() { return worlds_moved_.exchange(false); }
  // Becomes readable when there is something to take.
  int descriptor() const { return wake_.get(); }
  // Makes it unreadable again: call it before taking.
  void Hear() const;

  // ---- jobs of which other daemons have ranks (Worlds)
  bool has_worlds() const { return worlds_ != nullptr; }
  void See(const NodeRanks& mine);
  Result<JobWorld> WorldOf(const std::string& run, const std::string& job) const;
  void Drop(const DroppedStep& step);
  void Leave(const std::string& run, const std::string& job);

  // ---- the end
  // No save waits for a store that fails: it is tried once more, or stays in the spool.
  void End();
  // Parts of several daemons' steps are made durable, if that can be at once; it is then for other
  // daemons to make them steps.  BLOCKS: on that.
  void StopWorlds();
  // BLOCKS: until no save waits for the store.
  void Finish();

  LandingStatus status() const;

 private:
  using Clock = std::chrono::steady_clock;
  // A daemon that does not have rank 0 looks every turn whether a save is decided, and only after
  // so many turns at all parts of it, then twice as seldom each time.
  static constexpr int kFirstLook = 10;
  static constexpr int kMostTurns = 40;
  enum class Meets {
    kNothing,  // it waits behind others
    kMemory,   // the same, and it could not be entered before its turn
    kStore,
  };
  struct Save {
    PreparedPart what;                      // with the life
    std::shared_ptr<SaveBytes> bytes = {};  // null once they are not needed any more
    Clock::time_point first;                // when the first part came
    std::string place = {};                 // Outcome::place
    LandingState state = LandingState::kWhole;
    LandingAction action = LandingAction::kEnter;
    bool busy = false;  // a hand does that
    Meets met = Meets::kNothing;
    Tries tries = {};
    StepRecord record = {};  // once it was entered
    // For a save that other daemons have ranks of:
    int turns = 0;               // in which it was waited for the daemon with rank 0
    int next_look = kFirstLook;  // at all parts of it: in that turn
    std::set<uint32_t> missing = {};
    bool may_be_step = false;  // and that may have been forgotten before our record was there

    bool all_here() const { return what.ranks.size() == what.world; }
    std::string title() const;
  };
  using Saves = std::list<Save>;

  // landing.cc
  static bool IsSame(const Save& save, const PreparedPart& part);
  Save* FirstToStore() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first save of a run that is due, so that a run whose store fails holds up no other; null
  // with the time at which one will be.
  Save* NextToStore(Clock::time_point now, Worker::Time& due) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first of a job that is to be prepared and due; null if there is none.
  Save* NextToPrepare() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Tell(const StepMaker::News& news);
  Worker::Time StoreTurn();
  Worker::Time ShowTurn();
  void Land(Save& save);
  void Entered(Save& save, StepMaker::Entered entered);
  void LookFor(const PartAgain& question);
  // Advances a save by an event, after which it waits for a hand.
  void Advance(Save& save, LandingEvent event);
  void Failed(Save& save, Error error);
  // True if it stays in the spool for the next daemon.
  bool Leaves(Save& save);
  void GiveUp(Save& save, LandingEvent event, Error error);
  // Advances a save to its end.
  void Conclude(Save& save, LandingEvent event, Status done,
                const std::optional<StepMaker::News>& news);
  // `first`: when the first part of it came.
  void Tally(const std::string& title, Clock::time_point first, LandingEvent event,
             const Status& done) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeStore();
  void Signal() const;
  void Say(const std::string& line) const;

  // landing_worlds.cc
  Worker::Time WorldTurn();
  static std::string RanksOf(const std::set<uint32_t>& ranks);
  void PrepareAll();
  void Prepare(Save& save);
  Result<bool> IsStep(const Save& save);
  // True if it is in a step already; else it is prepared.
  Result<bool> WriteDown(Save& save);
  void LookAtAll();
  void LookAt(Save& save);
  void Waits(Save& save, const AttemptNews& news);
  // Nothing while it is not decided, for a daemon that need not know more of it.
  Result<std::optional<AttemptNews>> NewsOf(Save& save);
  // True if it was a step already, or the store does not say so far.
  bool MayBeStep(Save& save, AttemptNews& news);
  void Decided(Save& save, const AttemptNews& news);
  void DropForAll(Save& save, const std::string& why);
  // Drops our part if other machines' ranks saved the step in a later turn, and tells our ranks.
  bool DropApart(const Save& save, const std::map<uint64_t, uint64_t>& later);
  void FinishOthers();
  bool Late(const Save& save) const { return Clock::now() - save.first >= options_.patience; }

  const LandingOptions options_;
  const std::unique_ptr<Worlds> worlds_;  // null: all ranks have to be here
  std::atomic<Protector*> protector_{nullptr};
  Descriptor wake_;
  std::atomic<bool> ending_{false};
  std::atomic<bool> worlds_ending_{false};
  std::atomic<bool> worlds_moved_{false};
  mutable Mutex mutex_;
  CondVar stored_;
  Saves saves_ GUARDED_BY(mutex_);  // by arrival
  QuestionQueue questions_ GUARDED_BY(mutex_){Clock::now()};
  std::multiset<AttemptName> looked_for_ GUARDED_BY(mutex_);
  News news_ GUARDED_BY(mutex_);
  LandingStatus status_ GUARDED_BY(mutex_);  // without what is counted when somebody asks
  enum class Phase { kNew, kRuns, kFinishes } phase_ GUARDED_BY(mutex_) = Phase::kNew;
  Clock::time_point finished_{};  // the worlds' hand's: when it last looked at what others left
  std::string said_;              // its, too: the last failure that was logged
  Worker store_;                  // last: they use all others
  Worker show_;
  Worker world_;
};

}  // namespace ckptfs
