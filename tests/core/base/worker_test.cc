// SPDX-License-Identifier: Apache-2.0

#include "core/base/worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <string>

namespace ckptfs {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(WorkerTest, DoesOneTurnForEachTimeThatItIsWokenWhileItRests) {
  std::atomic<int> turns{0};
  Worker worker;
  worker.Start(Worker::kWhenWoken, [&] {
    ++turns;
    turns.notify_all();
    return Worker::kWhenWoken;
  });
  EXPECT_EQ(turns, 0);
  for (int want = 1; want <= 3; ++want) {
    worker.Wake();
    turns.wait(want - 1);
    EXPECT_EQ(turns, want);
  }
}

TEST(WorkerTest, CallsDuringATurnAskForOneMore) {
  std::promise<void> begun, go_on, again;
  int turns = 0;
  Worker worker;
  worker.Start(Worker::kWhenWoken, [&] {
    if (++turns == 1) {
      begun.set_value();
      go_on.get_future().wait();
    } else if (turns == 2) {
      again.set_value();
    }
    return Worker::kWhenWoken;
  });
  worker.Wake();
  begun.get_future().wait();
  for (int i = 0; i < 5; ++i) worker.Wake();
  go_on.set_value();
  again.get_future().wait();
  worker.Stop();
  EXPECT_EQ(turns, 2);
}

TEST(WorkerTest, ATurnComesWhenTheLastOneSaid) {
  std::promise<void> third;
  int turns = 0;
  Worker worker;
  worker.Start(Worker::Clock::now(), [&] {
    if (++turns == 3) third.set_value();
    return turns < 3 ? Worker::Clock::now() + milliseconds(1) : Worker::kWhenWoken;
  });
  third.get_future().wait();
  worker.Stop();
  EXPECT_EQ(turns, 3);
}

TEST(WorkerTest, AnExceptionEndsOneTurn) {
  std::promise<std::string> told;
  std::promise<void> second;
  int turns = 0;
  Worker worker;
  worker.Start(
      Worker::Clock::now(),
      [&]() -> Worker::Time {
        if (++turns == 1) throw std::runtime_error("a turn failed");
        if (turns == 2) second.set_value();
        return Worker::kWhenWoken;
      },
      [&](const Error& error) { told.set_value(error.message); });
  EXPECT_EQ(told.get_future().get(), "a turn failed");
  worker.Wake();
  second.get_future().wait();
}

TEST(WorkerTest, StopEndsARestAndAPauseAndNoTurnBeginsAfterIt) {
  std::promise<void> begun;
  std::atomic<int> turns{0};
  bool went_on = true;
  Worker worker;
  worker.Start(Worker::Clock::now(), [&] {
    ++turns;
    begun.set_value();
    went_on = worker.Pause(Worker::Clock::now() + hours(1));
    return Worker::Clock::now();
  });
  begun.get_future().wait();
  EXPECT_FALSE(worker.stopping());
  worker.Stop();
  EXPECT_TRUE(worker.stopping());
  EXPECT_FALSE(went_on);
  EXPECT_EQ(turns, 1);
  worker.Wake();
  worker.Stop();
  EXPECT_EQ(turns, 1);
}

}  // namespace
}  // namespace ckptfs
