// SPDX-License-Identifier: Apache-2.0
//
// Saves between the last rank's part and their end, over a store that fails, throws or stands
// still at a call of the test's choice.  landing_state_test.cc has the table, kill_test.cc and
// nodes_kill_test.cc the daemons that die between transitions.
#include "snapshot/landing/landing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/snapshot/landings.h"
#include "tests/snapshot/spooling.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::kNever;
using testing_support::Save;

// Counts the calls that may fail, and notes what was done with which step.
class ScriptedSteps final : public StepMaker {
 public:
  Result<Entered> Enter(const std::shared_ptr<SaveBytes>& save) override {
    CKPT_RETURN_IF_ERROR(Call());
    StepRecord record;
    record.run = "run";
    record.id = StrCat(save->part().step);
    Note(StrCat("enter ", record.id));
    return Entered{record, found};
  }
  Result<StepRecord> Persist(const StepRecord& record) override {
    {
      std::unique_lock lock(mutex_);
      moved_.wait(lock, [&] { return !held_; });
    }
    CKPT_RETURN_IF_ERROR(Call());
    Note(StrCat("persist ", record.id));
    return record;
  }
  void Release(const StepRecord& record) override { Note(StrCat("release ", record.id)); }
  Result<std::optional<StepRecord>> FindStored(const PartAgain&) override { return std::nullopt; }
  std::shared_ptr<BlobStream> Stream(const std::string&, uint64_t,
                                     std::weak_ptr<const void>) override {
    return nullptr;
  }
  void Tell(const News& news) override {
    Note(news.what == News::What::kInVain ? "in vain" : StrCat("durable ", news.record.id));
  }

  // The calls from `first` to `last` fail with `code`, or throw.
  void FailAt(uint64_t first, uint64_t last, ErrorCode code, bool throws = false) {
    const std::lock_guard lock(mutex_);
    first_ = first;
    last_ = last;
    code_ = code;
    throws_ = throws;
  }
  // No step becomes durable until it is let go.
  void Hold(bool hold) {
    const std::lock_guard lock(mutex_);
    held_ = hold;
    moved_.notify_all();
  }
  std::vector<std::string> notes() const {
    const std::lock_guard lock(mutex_);
    return notes_;
  }
  uint64_t calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  bool found = false;

 private:
  Status Call() {
    const std::lock_guard lock(mutex_);
    ++calls_;
    if (calls_ < first_ || calls_ > last_) return {};
    if (throws_) throw std::bad_alloc();
    return Fail(code_, "the store fails");
  }
  void Note(std::string what) {
    const std::lock_guard lock(mutex_);
    notes_.push_back(std::move(what));
  }
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  uint64_t calls_ = 0, first_ = 1, last_ = 0;
  ErrorCode code_ = ErrorCode::kIo;
  bool throws_ = false, held_ = false;
  std::vector<std::string> notes_;
};

class LandingTest : public testing::Test {
 protected:
  void Start(RetryRule retry = {milliseconds(1), milliseconds(1)}, bool spool = false) {
    if (spool) {
      SpoolerOptions options;
      options.budget = 1 << 20;
      options.patience = kNever;
      options.log = [](std::string_view) {};
      spooler_ = std::make_unique<Spooler>(*Spool::OpenOn(disk_, "store"), std::move(options));
    }
    landing_ = std::make_unique<Landing>(
        LandingOptions{.steps = &steps_, .spooler = spooler_.get(), .retry = retry});
    ASSERT_TRUE(landing_->Start());
  }
  void Take(const Save& save) { landing_->Take(save.bytes, std::chrono::steady_clock::now()); }
  // Waits for so many that are over.
  std::vector<std::string> Await(size_t count) {
    std::vector<std::string> over;
    while (over.size() < count) {
      for (const Landing::Outcome& one : landing_->TakeNews().over) {
        over.push_back(
            StrCat(one.step, one.done ? "" : ": ", one.done ? "" : one.done.error().message));
      }
      std::this_thread::yield();
    }
    return over;
  }

  const std::shared_ptr<MemoryRoot> disk_ = std::make_shared<MemoryRoot>("disk");
  ScriptedSteps steps_;
  std::unique_ptr<Spooler> spooler_;
  std::unique_ptr<Landing> landing_;
};

TEST_F(LandingTest, SavesBecomeStepsInOrder) {
  Start();
  const Save first(1), second(2);
  Take(first);
  Take(second);
  EXPECT_THAT(Await(2), ElementsAre("1", "2"));
  EXPECT_THAT(steps_.notes(), ElementsAre("enter 1", "persist 1", "durable 1", "enter 2",
                                          "persist 2", "durable 2"));
  EXPECT_EQ(landing_->status().durable, 2u);
  EXPECT_EQ(landing_->status().waiting, 0u);
  EXPECT_EQ(landing_->status().last_durable, "run/2");
}

// Whichever call fails or throws once: all become durable, in order.
TEST_F(LandingTest, AnyCallMayFailOnce) {
  for (const bool throws : {false, true}) {
    for (uint64_t n = 1; n <= 6; ++n) {
      SCOPED_TRACE(n);
      ScriptedSteps steps;
      steps.FailAt(n, n, ErrorCode::kIo, throws);
      Landing landing({.steps = &steps, .retry = {milliseconds(1), milliseconds(1)}});
      ASSERT_TRUE(landing.Start());
      const Save first(1), second(2), third(3);
      for (const Save* save : {&first, &second, &third}) {
        landing.Take(save->bytes, std::chrono::steady_clock::now());
      }
      landing.Finish();
      EXPECT_EQ(landing.status().durable, 3u);
      EXPECT_EQ(steps.calls(), 7u);
      std::vector<uint64_t> order;
      for (const Landing::Outcome& one : landing.TakeNews().over) order.push_back(one.step);
      EXPECT_THAT(order, ElementsAre(1u, 2u, 3u));
    }
  }
}

// Those behind it are none the worse.
TEST_F(LandingTest, WhatIsRefusedOrGivenUpIsDroppedAlone) {
  struct Case {
    uint64_t from, to;
    ErrorCode code;
    std::vector<std::string> notes;
    uint64_t LandingStatus::Drops::*reason;
  };
  using Drops = LandingStatus::Drops;
  const std::vector<Case> cases{
      {1, 1, ErrorCode::kInvalid, {"in vain"}, &Drops::refused},
      {1, 1, ErrorCode::kExists, {"in vain"}, &Drops::refused},
      {2, 2, ErrorCode::kDataLoss, {"enter 1", "release 1", "in vain"}, &Drops::refused},
      // For longer than the limit, which is none:
      {1, 1, ErrorCode::kIo, {"in vain"}, &Drops::failed},
      {2, 2, ErrorCode::kIo, {"enter 1", "release 1", "in vain"}, &Drops::failed},
      {1, 1, ErrorCode::kExhausted, {"in vain"}, &Drops::exhausted},
  };
  for (const Case& one : cases) {
    ScriptedSteps steps;
    steps.FailAt(one.from, one.to, one.code);
    Landing landing(
        {.steps = &steps, .retry = {milliseconds(1), milliseconds(1), milliseconds(0)}});
    ASSERT_TRUE(landing.Start());
    const Save first(1), second(2);
    landing.Take(first.bytes, std::chrono::steady_clock::now());
    landing.Take(second.bytes, std::chrono::steady_clock::now());
    landing.Finish();
    auto expected = one.notes;
    expected.insert(expected.end(), {"enter 2", "persist 2", "durable 2"});
    EXPECT_EQ(steps.notes(), expected);
    EXPECT_EQ(landing.status().durable, 1u);
    EXPECT_EQ(landing.status().dropped, 1u);
    EXPECT_EQ(landing.status().last_drop, "snapshot run/1 dropped: the store fails");
    const Drops drops = landing.status().dropped_for;
    EXPECT_EQ(drops.*one.reason, 1u);
    EXPECT_EQ(drops.incomplete + drops.refused + drops.exhausted + drops.failed, 1u);
    EXPECT_GT(landing.status().durable_seconds, 0);
    EXPECT_GT(landing.status().last_durable_ns, 0);
    EXPECT_EQ(landing.status().oldest_waiting_seconds, 0);
    landing.NoteDrop("a rank went");
    EXPECT_EQ(landing.status().dropped_for.incomplete, 1u);
  }
}

TEST_F(LandingTest, WhatIsStoredAlreadyIsNotStoredTwice) {
  Start();
  steps_.found = true;
  const Save save(1);
  Take(save);
  EXPECT_THAT(Await(1), ElementsAre("1"));
  EXPECT_THAT(steps_.notes(), ElementsAre("enter 1", "durable 1"));
}

TEST_F(LandingTest, TheSameSaveAgainIsOne) {
  Start();
  steps_.Hold(true);
  const Save save(1);
  Take(save);
  Take(save);
  EXPECT_EQ(landing_->names().size(), 1u);
  steps_.Hold(false);
  EXPECT_THAT(Await(1), ElementsAre("1"));
  landing_->Finish();
  EXPECT_EQ(landing_->status().durable, 1u);
}

// The store stands still with the first.
TEST_F(LandingTest, WhatWaitsIsShownWhereThereIsASpool) {
  Start({}, true);
  steps_.Hold(true);
  const Save first(1), second(2);
  Take(first);
  Take(second);
  while (!second.bytes->on_disk() || steps_.notes().size() < 2) std::this_thread::yield();
  EXPECT_THAT(steps_.notes(), testing::UnorderedElementsAre("enter 1", "enter 2"));
  EXPECT_EQ(landing_->status().waiting, 2u);
  EXPECT_GT(landing_->status().oldest_waiting_seconds, 0);
  steps_.Hold(false);
  EXPECT_THAT(Await(2), ElementsAre("1", "2"));
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

// Nobody is told: the next daemon says what becomes of it.
TEST_F(LandingTest, AtTheEndTheSpoolHasWhatTheStoreDoesNotTake) {
  Start({}, true);
  steps_.FailAt(2, UINT64_MAX, ErrorCode::kIo);
  const Save save(1);
  Take(save);
  while (!save.bytes->on_disk()) std::this_thread::yield();
  landing_->End();
  landing_->Finish();
  EXPECT_TRUE(save.bytes->stays());
  EXPECT_TRUE(landing_->TakeNews().over.empty());
  EXPECT_EQ(landing_->status().durable + landing_->status().dropped, 0u);
  EXPECT_THAT(steps_.notes(), ElementsAre("enter 1"));  // and shown until the end
  landing_.reset();
  spooler_.reset();

  ScriptedSteps next;
  SpoolerOptions options;
  options.log = [](std::string_view) {};
  Spooler spooler(*Spool::OpenOn(disk_, "store"), std::move(options));
  Landing landing({.steps = &next, .spooler = &spooler});
  ASSERT_TRUE(landing.Start());
  landing.Finish();
  EXPECT_THAT(next.notes(), ElementsAre("enter 1", "persist 1", "durable 1"));
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

TEST_F(LandingTest, AtTheEndWithoutASpoolItIsTriedOnceMore) {
  Start({kNever, kNever});
  steps_.FailAt(2, UINT64_MAX, ErrorCode::kIo);
  const Save save(1);
  Take(save);
  while (steps_.calls() < 2) std::this_thread::yield();
  landing_->End();
  EXPECT_THAT(Await(1), ElementsAre("1: the store fails"));
  EXPECT_GE(steps_.calls(), 3u);
  EXPECT_LE(steps_.calls(), 4u);  // it may have failed after the end had begun
}

}  // namespace
}  // namespace ckptfs
