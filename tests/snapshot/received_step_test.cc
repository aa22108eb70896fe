// SPDX-License-Identifier: Apache-2.0
#include "snapshot/landing/received_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "core/base/strings.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

using Time = IncomingSteps::Time;
using std::chrono::seconds;

const AttemptName kFirst{"run", "job", 1};
const AttemptName kSecond{"run", "job", 2};

TEST(IncomingStepsTest, AStepIsThereWithItsLastRank) {
  IncomingSteps steps;
  EXPECT_FALSE(steps.Add(kFirst, 7, 1, 2, {}, Time()));
  EXPECT_FALSE(steps.Add(kSecond, 7, 0, 2, {}, Time()));  // another attempt at it
  const auto whole = steps.Add(kFirst, 7, 0, 2, {}, Time());
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->step, 7u);
  EXPECT_EQ(whole->files.size(), 2u);
  EXPECT_EQ(steps.size(), 1u);
  EXPECT_TRUE(steps.TakeDropped().empty());
}

TEST(IncomingStepsTest, WhatOneRankDropsIsDroppedForAll) {
  IncomingSteps steps;
  steps.Drop(kFirst, 7, "full");
  EXPECT_FALSE(steps.Add(kFirst, 7, 0, 1, {}, Time()));
  EXPECT_FALSE(steps.Add(kSecond, 8, 0, 2, {}, Time()));
  steps.Drop(kSecond, 8, "full");
  steps.Drop(kSecond, 8, "again");
  EXPECT_FALSE(steps.Add(kSecond, 8, 1, 2, {}, Time()));
  EXPECT_EQ(steps.TakeDropped().size(), 4u);  // two of them again
  EXPECT_EQ(steps.size(), 0u);
}

// However many another job has dropped.
TEST(IncomingStepsTest, WhatWasDroppedLastIsRemembered) {
  IncomingSteps steps;
  for (uint64_t attempt = 1; attempt < 10'000; ++attempt) {
    steps.Drop({"run", "other", attempt}, attempt, "full");
  }
  steps.Drop(kFirst, 7, "full");
  EXPECT_FALSE(steps.Add(kFirst, 7, 0, 2, {}, Time()));
  EXPECT_EQ(steps.size(), 0u) << "it waits for a rank that has dropped it";
}

TEST(IncomingStepsTest, RanksThatDisagreeMakeNoStep) {
  for (const auto& [step, world] : {std::pair(8, 2), std::pair(7, 3)}) {
    IncomingSteps steps;
    EXPECT_FALSE(steps.Add(kFirst, 7, 0, 2, {}, Time()));
    EXPECT_FALSE(steps.Add(kFirst, static_cast<uint64_t>(step), 1, static_cast<uint32_t>(world), {},
                           Time()));
    ASSERT_EQ(steps.TakeDropped().size(), 1u);
    EXPECT_FALSE(steps.Add(kFirst, 7, 1, 2, {}, Time()));
  }
  IncomingSteps twice;
  EXPECT_FALSE(twice.Add(kFirst, 7, 0, 2, {}, Time()));
  EXPECT_FALSE(twice.Add(kFirst, 7, 0, 2, {}, Time()));
  EXPECT_EQ(twice.TakeDropped().size(), 1u);
}

TEST(IncomingStepsTest, WhatARankPassesOverIsDroppedAtOnce) {
  const auto name = [](uint64_t attempt) { return AttemptName{"run", "job", attempt}; };
  const auto why = [](IncomingSteps& steps) {
    const auto dropped = steps.TakeDropped();
    return dropped.size() == 1 ? dropped.front().why : StrCat(dropped.size(), " steps dropped");
  };
  IncomingSteps steps;
  for (const uint32_t rank : {0, 1}) EXPECT_TRUE(steps.Begin(name(1), 1, rank, false));
  EXPECT_FALSE(steps.Add(name(1), 1, 0, 2, {}, Time()));
  EXPECT_TRUE(steps.Add(name(1), 1, 1, 2, {}, Time()));

  // Rank 1 has nothing of 2: known when it begins 3,
  EXPECT_TRUE(steps.Begin(name(2), 2, 0, false));
  EXPECT_FALSE(steps.Add(name(2), 2, 0, 2, {}, Time()));
  EXPECT_EQ(steps.size(), 1u);
  EXPECT_TRUE(steps.Begin(name(3), 3, 1, false));
  EXPECT_EQ(why(steps), "rank 1 went on without it");
  EXPECT_EQ(steps.size(), 0u);
  // or, where the others are slower, when they end theirs.
  EXPECT_TRUE(steps.Begin(name(4), 4, 1, false));
  EXPECT_TRUE(steps.Begin(name(5), 5, 1, false));
  EXPECT_TRUE(steps.Begin(name(4), 4, 0, false));
  EXPECT_FALSE(steps.Add(name(4), 4, 0, 2, {}, Time()));
  EXPECT_EQ(steps.size(), 1u) << "rank 1 has begun it";
  EXPECT_TRUE(steps.TakeDropped().empty());
  EXPECT_FALSE(steps.Add(name(3), 3, 1, 2, {}, Time()));
  EXPECT_EQ(why(steps), "rank 0 went on without it");
  EXPECT_TRUE(steps.Begin({"run", "other", 9}, 9, 1, false)) << "of another job";
  EXPECT_TRUE(steps.Add(name(4), 4, 1, 2, {}, Time()));
}

using Comes = JobLives::Comes;

TEST(IncomingStepsTest, WhatLacksThePartOfARankThatHasEndedIsDropped) {
  const RankOfJob zero{"run", "job", 0, 2, 11}, one{"run", "job", 1, 2, 12};
  IncomingSteps steps;
  ASSERT_TRUE(steps.Greet(zero, Comes::kNew, {}));
  ASSERT_TRUE(steps.Greet(one, Comes::kNew, {}));
  EXPECT_FALSE(steps.Add(kFirst, 7, 0, 2, {}, Time()));
  steps.Leave(one, Comes::kNew, {});
  EXPECT_EQ(steps.size(), 1u) << "it may come again";
  EXPECT_TRUE(steps.End({one}));
  auto dropped = steps.TakeDropped();
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_THAT(dropped[0].why, testing::HasSubstr("rank 1's process ended"));
  // So is what it does not save later; but what an earlier daemon had may be stored.
  EXPECT_FALSE(steps.Add(kSecond, 8, 0, 2, {}, Time()));
  EXPECT_EQ(steps.TakeDropped().size(), 1u);
  ReceivedFile again;
  again.again = true;
  EXPECT_FALSE(steps.Add({"run", "job", 3}, 9, 0, 2, std::move(again), Time()));
  EXPECT_TRUE(steps.TakeDropped().empty());
  // The part that it has handed over is there.
  EXPECT_FALSE(steps.Add({"run", "other", 4}, 9, 1, 2, {}, Time()));
  EXPECT_TRUE(steps.End({{"run", "other", 1, 2, 5}}));
  EXPECT_TRUE(steps.Add({"run", "other", 4}, 9, 0, 2, {}, Time()));
}

TEST(IncomingStepsTest, WhatTheDeadLeftInPartMakesRoom) {
  const RankOfJob zero{"run", "own:a", 0, 2, 11};
  const AttemptName name{"run", "own:a", 1};
  IncomingSteps steps;
  ASSERT_TRUE(steps.Greet(zero, Comes::kNew, {}));
  EXPECT_FALSE(steps.Add(name, 7, 0, 2, {}, Time()));
  steps.DropLeftBehind();
  EXPECT_EQ(steps.size(), 1u) << "a rank is here";
  steps.Leave(zero, Comes::kNew, {});
  steps.DropLeftBehind();
  EXPECT_EQ(steps.size(), 1u) << "it may come again";
  EXPECT_TRUE(steps.End({zero}));
  EXPECT_EQ(steps.size(), 1u) << "another machine may have rank 1";
  steps.DropLeftBehind();
  EXPECT_EQ(steps.size(), 0u);
}

TEST(IncomingStepsTest, ARankThatIsRefusedIsToldToTheOthers) {
  const RankOfJob zero{"run", "job", 0, 2, 11}, one{"run", "job", 1, 2, 12};
  const AttemptName name{"run", "job", NextAttempt(0, 7)};
  for (const bool before : {true, false}) {
    IncomingSteps steps;
    ASSERT_TRUE(steps.Greet(zero, Comes::kNew, {}));
    if (before) {
      EXPECT_FALSE(steps.Add(name, 7, 0, 2, {}, Time()));
    }
    steps.Refuse(one, name.attempt, "no room");
    if (!before) {
      EXPECT_FALSE(steps.Add(name, 7, 0, 2, {}, Time()));
    }
    const auto dropped = steps.TakeDropped();
    ASSERT_FALSE(dropped.empty());
    EXPECT_EQ(dropped[0].why, "rank 1: no room");
    EXPECT_EQ(dropped[0].step, 7u);
    EXPECT_EQ(steps.size(), 0u);
  }
  // Nobody of another life of that text has a say.
  IncomingSteps steps;
  ASSERT_TRUE(steps.Greet(zero, Comes::kNew, {}));
  EXPECT_FALSE(steps.Add(name, 7, 0, 2, {}, Time()));
  steps.Leave(zero, Comes::kNew, {});
  steps.Refuse(one, name.attempt, "no room");
  steps.Refuse({"run", "job", 0, 2, 99}, name.attempt, "no room");
  EXPECT_EQ(steps.size(), 1u);
}

// A rank that returns names only what is not settled for it: the others may still ask.
TEST(IncomingStepsTest, WhatWasBegunWithAnEarlierDaemonIsNotPassedOver) {
  const AttemptName third{"run", "job", 3};
  IncomingSteps steps;
  EXPECT_TRUE(steps.Begin(kFirst, 1, 1, true));
  EXPECT_TRUE(steps.Begin(third, 3, 1, false));
  EXPECT_TRUE(steps.Begin(kSecond, 2, 0, true));
  EXPECT_FALSE(steps.Add(kSecond, 2, 0, 2, {}, Time()));
  EXPECT_TRUE(steps.Begin({"run", "job", 4}, 4, 1, false));
  EXPECT_TRUE(steps.TakeDropped().empty());
  EXPECT_EQ(steps.size(), 1u);
}

TEST(IncomingStepsTest, RanksThatNeverComeAreNamed) {
  IncomingSteps steps;
  EXPECT_FALSE(steps.Add(kFirst, 7, 1, 4, {}, Time() + seconds(1)));
  EXPECT_FALSE(steps.Add(kSecond, 8, 1, 4, {}, Time() + seconds(5)));
  steps.DropOlder(Time() + seconds(3));
  const auto dropped = steps.TakeDropped();
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].step, 7u);
  EXPECT_THAT(dropped[0].why, testing::HasSubstr("rank 0, 2-3"));
  EXPECT_EQ(steps.size(), 1u);
}

TEST(IncomingStepsTest, ARankBeginsAnAttemptOnce) {
  IncomingSteps steps;
  EXPECT_TRUE(steps.Begin(kFirst, 1, 0, false));
  EXPECT_FALSE(steps.Begin(kFirst, 1, 0, false));
  EXPECT_TRUE(steps.Begin(kFirst, 1, 1, false));
  EXPECT_TRUE(steps.Begin(kSecond, 2, 0, false));
  EXPECT_FALSE(steps.Begin(kFirst, 1, 0, false));
  EXPECT_TRUE(steps.Begin({"run", "other", 1}, 1, 0, false));
}

TEST(IncomingStepsTest, WhoEndsItsPartTooLateIsTold) {
  IncomingSteps steps;
  steps.Drop(kFirst, 7, "full");
  EXPECT_FALSE(steps.TakeDropped()[0].again);
  EXPECT_FALSE(steps.Add(kFirst, 7, 0, 1, {}, Time()));
  const auto dropped = steps.TakeDropped();
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_TRUE(dropped[0].again);
  EXPECT_EQ(dropped[0].why, "full");
}

// ---- going back ------------------------------------------------------------------

// A job whose ranks save as a test says.
class Ranks {
 public:
  // The reason why it is dropped; empty: it is waited for.  "whole" if it is that.
  std::string Save(uint32_t rank, uint64_t step) {
    uint64_t& last = last_[rank];
    last = NextAttempt(last, step);
    const AttemptName name{"run", "job", last};
    if (!greeted_.contains(rank)) {
      EXPECT_TRUE(steps.Greet({"run", "job", rank, 2, 7 + rank}, JobLives::Comes::kNew, Born()));
      greeted_.insert(rank);
    }
    EXPECT_TRUE(steps.Begin(name, step, rank, false));
    const auto whole = steps.Add(name, step, rank, 2, {}, Time());
    const std::string why = Hear(name);
    if (whole) steps.Forget(name);
    return whole ? "whole" : why;
  }
  // Both ranks.
  std::string Save(uint64_t step) {
    Save(0, step);
    return Save(1, step);
  }
  void Drop(uint32_t rank, uint64_t step) {
    last_[rank] = NextAttempt(last_[rank], step);
    steps.Cancel({"run", "job", last_[rank]}, step, rank, "full");
    Hear({});
  }
  static JobLives::Time Born() { return JobLives::Time(1); }
  IncomingSteps steps;
  std::vector<std::string> dropped;

 private:
  // Reads what all ranks are told; returns why this attempt is dropped.
  std::string Hear(const AttemptName& name) {
    std::string why;
    for (const DroppedStep& one : steps.TakeDropped()) {
      if (one.name == name && !one.again) why = one.why;
      dropped.push_back(StrCat(one.step, ": ", one.why));
      if (one.why != kApart) continue;
      for (auto& [number, attempt] : last_) attempt = InTurnOf(one.name.attempt, attempt);
    }
    return why;
  }

  std::map<uint32_t, uint64_t> last_;
  std::set<uint32_t> greeted_;
};

// One step is lost, at most, and not all that come.
TEST(IncomingStepsTest, RanksThatWentBackAloneAreTogetherAgain) {
  {
    Ranks job;  // one saves a number far ahead
    EXPECT_EQ(job.Save(5), "whole");
    job.Save(0, 1'000'000);
    job.Save(40);
    for (const uint64_t step : {41, 42, 43}) EXPECT_EQ(job.Save(step), "whole") << step;
    EXPECT_EQ(job.steps.size(), 0u);
  }
  {
    Ranks job;  // one misses what all go back behind
    EXPECT_EQ(job.Save(20), "whole");
    job.Save(0, 30);
    job.Save(25);
    for (const uint64_t step : {40, 41, 25, 26}) EXPECT_EQ(job.Save(step), "whole") << step;
  }
  {
    Ranks job;  // one tries many times
    for (int i = 0; i < 70; ++i) job.Save(0, 5);
    job.Save(1, 5);
    job.Save(40);
    for (const uint64_t step : {41, 42}) EXPECT_EQ(job.Save(step), "whole") << step;
    EXPECT_EQ(job.steps.size(), 0u);
  }
}

// It has no room for the step, say, and the other one has begun it before that is known.
TEST(IncomingStepsTest, ARankThatDropsItsSaveIsApartAllTheSame) {
  for (const bool before : {true, false}) {
    Ranks job;
    EXPECT_EQ(job.Save(5), "whole");
    job.Save(0, 1'000'000);
    if (before) job.Drop(0, 40);
    job.Save(1, 40);
    if (!before) job.Drop(0, 40);
    for (const uint64_t step : {41, 42})
      EXPECT_EQ(job.Save(step), "whole") << step << " " << before;
    EXPECT_EQ(job.steps.size(), 0u);
  }
}

TEST(IncomingStepsTest, RanksThatAreLateAreNotApart) {
  Ranks job;
  for (const uint64_t step : {20, 30, 25, 30}) EXPECT_EQ(job.Save(0, step), "");
  for (const uint64_t step : {20, 30, 25, 30}) EXPECT_EQ(job.Save(1, step), "whole") << step;
  EXPECT_TRUE(job.dropped.empty());
}

TEST(IncomingStepsTest, WhatARankSavesAgainAloneIsDropped) {
  Ranks job;
  EXPECT_EQ(job.Save(4), "whole");
  for (int i = 0; i < 5; ++i) EXPECT_EQ(job.Save(0, 5), "");
  EXPECT_EQ(job.steps.size(), 1u);
  EXPECT_EQ(job.dropped, (std::vector<std::string>(4, "5: rank 0 saved it again")));
  EXPECT_EQ(job.Save(6), "whole");
  // Each attempt that all ranks have begun counts.
  EXPECT_EQ(job.Save(7), "whole");
  EXPECT_EQ(job.Save(7), "whole");
}

// ---- lives -----------------------------------------------------------------------

using Comes = JobLives::Comes;

RankOfJob RankOf(uint32_t rank, uint64_t life, uint32_t world = 2, std::string job = "job") {
  return {"run", std::move(job), rank, world, life};
}

constexpr JobLives::Time kEarly{10}, kLate{30}, kSeen{20};

TEST(JobLivesTest, AnotherLifeWaitsUntilTheFirstIsGone) {
  IncomingSteps steps;
  EXPECT_TRUE(steps.Greet(RankOf(0, 1), Comes::kNew, kEarly));
  EXPECT_TRUE(steps.Greet(RankOf(1, 2), Comes::kNew, kEarly));
  EXPECT_FALSE(steps.Add(kFirst, 5, 0, 2, {}, Time()));
  steps.Leave(RankOf(0, 1), Comes::kNew, kSeen);
  const auto early = steps.Greet(RankOf(0, 3), Comes::kNew, kLate);
  ASSERT_FALSE(early) << "rank 1 is at work";
  EXPECT_EQ(early.error().code, ErrorCode::kExists);
  EXPECT_THAT(early.error().message, testing::HasSubstr("rank 1 of another life"));
  EXPECT_EQ(steps.size(), 1u);

  steps.Leave(RankOf(1, 2), Comes::kNew, kSeen);
  steps.ForgetJobs();  // a part is open
  EXPECT_TRUE(steps.Greet(RankOf(1, 4), Comes::kNew, kLate));
  const auto dropped = steps.TakeDropped();
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].why, "another life of its job began");
  EXPECT_LT(dropped[0].greetings, steps.greetings()) << "its own save has that name, too";
  EXPECT_EQ(steps.TakeRenewed().size(), 1u);
  // Its saves are its own: the first life's were as many.
  EXPECT_TRUE(steps.Begin(kFirst, 5, 1, false));
  EXPECT_FALSE(steps.Add(kFirst, 5, 1, 2, {}, Time()));
  EXPECT_TRUE(steps.Greet(RankOf(0, 3), Comes::kNew, kLate));
  EXPECT_TRUE(steps.Add(kFirst, 5, 0, 2, {}, Time()));
}

TEST(JobLivesTest, WhatIsStillWrittenIsOfTheFirstLife) {
  IncomingSteps steps;
  EXPECT_TRUE(steps.Greet(RankOf(0, 1, 1), Comes::kNew, kEarly));
  ASSERT_TRUE(steps.Add(kFirst, 5, 0, 1, {}, Time()));
  steps.Leave(RankOf(0, 1, 1), Comes::kNew, kSeen);
  steps.ForgetJobs();
  EXPECT_EQ(steps.Greet(RankOf(0, 2, 1), Comes::kNew, kLate).error().code, ErrorCode::kExists);
  steps.Forget(kFirst);  // it is stored
  EXPECT_TRUE(steps.Greet(RankOf(0, 2, 1), Comes::kNew, kLate));
}

// On two machines, whose ranks have changed places.
TEST(JobLivesTest, WhatIsStillWrittenIsNotOfWhoWasNotSeenBefore) {
  IncomingSteps steps;
  EXPECT_TRUE(steps.Greet(RankOf(0, 1), Comes::kNew, kEarly));
  EXPECT_FALSE(steps.Add(kFirst, 5, 0, 2, {}, Time()));
  steps.Take(kFirst);
  steps.Leave(RankOf(0, 1), Comes::kNew, kSeen);
  EXPECT_EQ(steps.Greet(RankOf(1, 2), Comes::kNew, kLate).error().code, ErrorCode::kExists);
  EXPECT_TRUE(steps.Greet(RankOf(1, 3), Comes::kNew, kEarly)) << "of one life";
  steps.Leave(RankOf(1, 3), Comes::kNew, kSeen);
  steps.Forget(kFirst);
  EXPECT_TRUE(steps.Greet(RankOf(1, 2), Comes::kNew, kLate));
}

// A rank that was not seen in the first life.
TEST(JobLivesTest, WhoBeganWhenAnotherHadGoneIsNotOfItsLife) {
  for (const auto& [born, job, mixes] : {std::tuple(std::optional(kLate), "job", false),
                                         std::tuple(std::optional(kEarly), "job", true),
                                         std::tuple(std::optional<JobLives::Time>(), "job", false),
                                         std::tuple(std::optional(kLate), "own:7", true)}) {
    const AttemptName name{"run", job, 1};
    IncomingSteps steps;
    EXPECT_TRUE(steps.Greet(RankOf(0, 1, 2, job), Comes::kNew, kEarly));
    EXPECT_TRUE(steps.Begin(name, 5, 0, false));
    EXPECT_FALSE(steps.Add(name, 5, 0, 2, {}, Time()));
    steps.Leave(RankOf(0, 1, 2, job), Comes::kNew, kSeen);
    EXPECT_TRUE(steps.Greet(RankOf(1, 2, 2, job), Comes::kNew, born));
    const auto dropped = steps.TakeDropped();
    EXPECT_EQ(dropped.size(), mixes ? 0u : 1u);
    for (const DroppedStep& one : dropped) {
      EXPECT_TRUE(one.earlier);
      EXPECT_LT(one.greetings, steps.greetings());
    }
    EXPECT_EQ(steps.Add(name, 5, 1, 2, {}, Time()).has_value(), mixes);
    if (mixes) continue;
    // And the first one's next life is that of the second.
    EXPECT_TRUE(steps.Greet(RankOf(0, 3, 2, job), Comes::kNew, kLate));
    EXPECT_TRUE(steps.Begin(name, 5, 0, false));
    EXPECT_TRUE(steps.Add(name, 5, 0, 2, {}, Time()));
  }
}

TEST(JobLivesTest, WorldsOfTwoSizesAreTwoLives) {
  IncomingSteps steps;
  EXPECT_TRUE(steps.Greet(RankOf(0, 1, 2), Comes::kNew, kEarly));
  const auto other = steps.Greet(RankOf(1, 1, 4), Comes::kNew, kEarly);
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message, testing::HasSubstr("the job has 2 ranks, not 4"));
  EXPECT_TRUE(steps.Greet(RankOf(1, 1, 4, "another"), Comes::kNew, kEarly));
  EXPECT_TRUE(steps.Greet(RankOf(1, 2, 2), Comes::kNew, kEarly));
}

// A daemon before this one had parts of ranks that are gone.
TEST(JobLivesTest, WhatIsLeftOfADaemonIsPutTogetherWithWhatItHadOnly) {
  for (const Comes other : {Comes::kNew, Comes::kBack, Comes::kForAnother}) {
    IncomingSteps steps;
    EXPECT_TRUE(steps.Greet(RankOf(0, 1), Comes::kForAnother, kEarly));
    EXPECT_TRUE(steps.Begin(kFirst, 5, 0, true));
    EXPECT_FALSE(steps.Add(kFirst, 5, 0, 2, {}, Time()));
    steps.Leave(RankOf(0, 1), Comes::kForAnother, kSeen);
    EXPECT_TRUE(steps.Greet(RankOf(1, 2), other, kEarly));
    EXPECT_EQ(steps.Add(kFirst, 5, 1, 2, {}, Time()).has_value(), other != Comes::kNew);
  }
  IncomingSteps steps;  // the other way round
  EXPECT_TRUE(steps.Greet(RankOf(1, 2), Comes::kNew, kEarly));
  EXPECT_EQ(steps.Greet(RankOf(0, 1), Comes::kForAnother, kEarly).error().code, ErrorCode::kStale);
}

TEST(JobLivesTest, WhoLeftBeforeOtherMachinesWereKnownMayBeOfAnotherLife) {
  for (const bool met : {false, true}) {
    IncomingSteps steps;
    EXPECT_TRUE(steps.Greet(RankOf(0, 1), Comes::kNew, kEarly));
    EXPECT_FALSE(steps.Add(kFirst, 5, 0, 2, {}, Time()));
    if (met) steps.Meet(kFirst);
    steps.Leave(RankOf(0, 1), Comes::kNew, kSeen);
    steps.Meet(kFirst);
    EXPECT_EQ(steps.DropUnmet(kFirst), !met);
    EXPECT_EQ(steps.size(), met ? 1u : 0u);
  }
}

}  // namespace
}  // namespace ckptfs
