// SPDX-License-Identifier: Apache-2.0
#include "snapshot/landing/question_queue.h"

#include <gtest/gtest.h>

#include <vector>

#include "snapshot/receive/rate_limit.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;

PartAgain Question(uint64_t asker, uint64_t step) {
  PartAgain part;
  part.asker = asker;
  part.step = step;
  return part;
}

TEST(QuestionQueueTest, AskersAreAnsweredInTurn) {
  const QuestionQueue::Time now{};
  QuestionQueue queue(now);
  EXPECT_TRUE(queue.empty());
  EXPECT_FALSE(queue.Next(now));
  for (uint64_t step = 0; step < 4; ++step) queue.Add(Question(1, step));
  queue.Add(Question(2, 10));
  queue.Add(Question(3, 20));
  queue.Add(Question(2, 11));
  std::vector<uint64_t> steps;
  while (const auto next = queue.Next(now)) steps.push_back(next->step);
  EXPECT_EQ(steps, (std::vector<uint64_t>{0, 10, 20, 1, 11, 2, 3}));
  EXPECT_TRUE(queue.empty());
}

TEST(QuestionQueueTest, WhoLeavesTakesQuestionsAboutOverSavesAlong) {
  const QuestionQueue::Time now{};
  QuestionQueue queue(now);
  for (uint64_t step = 0; step < 3; ++step) {
    queue.Add(Question(1, step));
    queue.Add(Question(2, step));
  }
  PartAgain over = Question(1, 5);
  over.over = true;
  over.name.attempt = 9;
  queue.Add(over);
  const auto forgotten = queue.ForgetOver(1);
  ASSERT_EQ(forgotten.size(), 1u);
  EXPECT_EQ(forgotten[0].attempt, 9u);
  EXPECT_TRUE(queue.ForgetOver(3).empty());
  size_t left = 0;
  while (queue.Next(now)) ++left;
  EXPECT_EQ(left, 6u);
}

TEST(QuestionQueueTest, LooksTakeAQuarterOfTheTime) {
  QuestionQueue::Time now{};
  QuestionQueue queue(now);
  for (uint64_t step = 0; step < 10'000; ++step) queue.Add(Question(1, step));
  QuestionQueue::Clock::duration spent{};
  const auto end = now + std::chrono::seconds(10);
  while (now < end) {
    const auto due = queue.Due(now);
    if (due > now) {
      EXPECT_FALSE(queue.Next(now));
      now = due;
    }
    ASSERT_TRUE(queue.Next(now)) << "when it is due";
    queue.Spent(milliseconds(5));
    spent += milliseconds(5);
    now += milliseconds(5);
  }
  EXPECT_GE(spent, milliseconds(2400));
  EXPECT_LE(spent, milliseconds(2700));
}

TEST(QuestionQueueTest, TheTimeOfALongSaveIsNotSavedUp) {
  QuestionQueue::Time now{};
  QuestionQueue queue(now);
  for (uint64_t step = 0; step < 100; ++step) queue.Add(Question(1, step));
  now += std::chrono::hours(1);
  size_t looks = 0;
  while (queue.Next(now)) {
    queue.Spent(milliseconds(10));
    ++looks;
  }
  EXPECT_EQ(looks, 5u);
}

TEST(RateLimitTest, SoOftenASecondAndSoOftenAtOnce) {
  RateLimit::Time now{};
  RateLimit limit(10, 5, now);
  const auto uses = [&] {
    int count = 0;
    for (; limit.Allows(); ++count) limit.Use();
    return count;
  };
  EXPECT_EQ(uses(), 5);
  limit.Pass(now += milliseconds(99));
  EXPECT_EQ(uses(), 0);
  limit.Pass(now += milliseconds(102));
  EXPECT_EQ(uses(), 2);
  limit.Pass(now += std::chrono::hours(1));
  EXPECT_EQ(uses(), 5);
}

}  // namespace
}  // namespace ckptfs
