// SPDX-License-Identifier: Apache-2.0
#include "snapshot/received_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"

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
  for (const uint32_t rank : {0, 1}) EXPECT_TRUE(steps.Begin(name(1), rank, false));
  EXPECT_FALSE(steps.Add(name(1), 1, 0, 2, {}, Time()));
  EXPECT_TRUE(steps.Add(name(1), 1, 1, 2, {}, Time()));

  // Rank 1 has nothing of 2: known when it begins 3,
  EXPECT_TRUE(steps.Begin(name(2), 0, false));
  EXPECT_FALSE(steps.Add(name(2), 2, 0, 2, {}, Time()));
  EXPECT_EQ(steps.size(), 1u);
  EXPECT_TRUE(steps.Begin(name(3), 1, false));
  EXPECT_EQ(why(steps), "rank 1 went on without it");
  EXPECT_EQ(steps.size(), 0u);
  // or, where the others are slower, when they end theirs.
  EXPECT_TRUE(steps.Begin(name(4), 1, false));
  EXPECT_TRUE(steps.Begin(name(5), 1, false));
  EXPECT_TRUE(steps.Begin(name(4), 0, false));
  EXPECT_FALSE(steps.Add(name(4), 4, 0, 2, {}, Time()));
  EXPECT_EQ(steps.size(), 1u) << "rank 1 has begun it";
  EXPECT_TRUE(steps.TakeDropped().empty());
  EXPECT_FALSE(steps.Add(name(3), 3, 1, 2, {}, Time()));
  EXPECT_EQ(why(steps), "rank 0 went on without it");
  EXPECT_TRUE(steps.Begin({"run", "other", 9}, 1, false)) << "of another job";
  EXPECT_TRUE(steps.Add(name(4), 4, 1, 2, {}, Time()));
}

// A rank that returns names only what is not settled for it: the others may still ask.
TEST(IncomingStepsTest, WhatWasBegunWithAnEarlierDaemonIsNotPassedOver) {
  const AttemptName kThird{"run", "job", 3};
  IncomingSteps steps;
  EXPECT_TRUE(steps.Begin(kFirst, 1, true));
  EXPECT_TRUE(steps.Begin(kThird, 1, false));
  EXPECT_TRUE(steps.Begin(kSecond, 0, true));
  EXPECT_FALSE(steps.Add(kSecond, 2, 0, 2, {}, Time()));
  EXPECT_TRUE(steps.Begin({"run", "job", 4}, 1, false));
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
  EXPECT_TRUE(steps.Begin(kFirst, 0, false));
  EXPECT_FALSE(steps.Begin(kFirst, 0, false));
  EXPECT_TRUE(steps.Begin(kFirst, 1, false));
  EXPECT_TRUE(steps.Begin(kSecond, 0, false));
  EXPECT_FALSE(steps.Begin(kFirst, 0, false));
  EXPECT_TRUE(steps.Begin({"run", "other", 1}, 0, false));
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

}  // namespace
}  // namespace ckptfs
