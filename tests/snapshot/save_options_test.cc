// SPDX-License-Identifier: Apache-2.0
//
// The options of a save: to wait for room, to be over by a time, to be over now; and the
// progress that it reports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using testing_support::kLong;
using testing_support::RankMemory;
using testing_support::ReceiverTest;

class SaveOptionsTest : public ReceiverTest {
 protected:
  // Copies that wait until Open.
  std::unique_ptr<SnapshotWriter> Slow() {
    return Writer(0, 1, [this] {
      const bool eager = !std::exchange(made_, true);  // is the first that is made
      return std::make_unique<LateCopier>(0, [this, eager] {
        if (!eager) opened_.wait();
      });
    });
  }
  std::unique_ptr<SnapshotWriter> Waiting(milliseconds limit) {
    WriterOptions options{directory_.path(), "run", "job", 0, 1, 1, limit, {}};
    options.wait_for_room = true;
    return std::make_unique<SnapshotWriter>(std::move(options));
  }
  void Open() { gate_.set_value(); }
  // Saves step 0, which fills the arena until Hold(false), and step 1, which waits for it.
  std::future<bool> SaveUntilOneWaits(SnapshotWriter& writer) {
    Hold(true);
    EXPECT_TRUE(writer.Save(memory_.Save(0, 0)));
    auto second = std::async(std::launch::async, [&] { return writer.Save(memory_.Save(1, 0)); });
    while (writer.status().full_waits == 0) std::this_thread::yield();
    return second;
  }

 private:
  RankMemory memory_{{6000}};
  bool made_ = false;
  std::promise<void> gate_;
  std::shared_future<void> opened_ = gate_.get_future().share();
};

TEST_F(SaveOptionsTest, ASaveMayWaitForRoom) {
  Start();
  const auto writer = Waiting(kLong);
  auto second = SaveUntilOneWaits(*writer);
  Hold(false);
  EXPECT_TRUE(second.get());
  EXPECT_TRUE(writer->WaitDurable(1, kLong));
  EXPECT_EQ(writer->status().full_drops, 0u);
  EXPECT_EQ(status()["full_waits"], 1);
  EXPECT_EQ(status()["full_drops"], 0);
}

TEST_F(SaveOptionsTest, ItWaitsNoLongerThanTrainingMayBeHeldUp) {
  Start();
  const auto writer = Waiting(milliseconds(20));
  RankMemory memory({6000});
  Hold(true);
  ASSERT_TRUE(writer->Save(memory.Save(0, 0)));
  EXPECT_FALSE(writer->Save(memory.Save(1, 0)));
  EXPECT_EQ(writer->status().full_drops, 1u);
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("arena is full"));
  Hold(false);
  EXPECT_TRUE(writer->WaitDurable(0, kLong));
  EXPECT_EQ(kept().size(), 1u);
}

// Copies that hold the room would take an hour at their pace.
TEST_F(SaveOptionsTest, ASaveThatWaitsForRoomIsNotHeldUpByThePace) {
  Start();
  WriterOptions options{directory_.path(), "run", "job", 0, 1, 1, milliseconds(5000), {}};
  options.wait_for_room = true;
  options.pace = 10;
  SnapshotWriter writer(std::move(options));
  RankMemory memory({6000});
  for (uint64_t step = 0; step < 3; ++step) {
    EXPECT_TRUE(writer.Save(memory.Save(step, 0))) << writer.status().last_drop;
  }
  writer.WaitBeforeUpdate();
  EXPECT_TRUE(writer.WaitDurable(2, kLong));
  EXPECT_EQ(writer.status().full_drops, 0u);
}

// And not when the first is dropped.
TEST_F(SaveOptionsTest, AStoreThatIsTooSlowIsSaidAtTheSecondSave) {
  Start();
  const auto writer = Writer();
  RankMemory memory({6000});
  Hold(true);
  ASSERT_TRUE(writer->Save(memory.Save(0, 0)));
  EXPECT_TRUE(writer->TakeLog().empty());
  std::this_thread::sleep_for(milliseconds(100));  // for which the store had time
  ASSERT_TRUE(writer->Save(memory.Save(1, 0)));
  const auto said = writer->TakeLog();
  ASSERT_EQ(said.size(), 1u);
  for (const char* help : {"slots=", "--spool", "fewer saves", "the next is dropped"}) {
    EXPECT_THAT(said[0], testing::HasSubstr(help));
  }
  EXPECT_FALSE(writer->Save(memory.Save(2, 0)));
  Hold(false);
  EXPECT_TRUE(writer->WaitDurable(1, kLong));
}

TEST_F(SaveOptionsTest, ADaemonThatGoesEndsTheWait) {
  Start();
  const auto writer = Waiting(kLong);
  auto second = SaveUntilOneWaits(*writer);
  auto end = std::async(std::launch::async, [&] { receiver_.reset(); });
  Hold(false);
  end.get();
  (void)second.get();  // taken or dropped, as it comes
  EXPECT_LE(kept().size(), 2u);
}

TEST_F(SaveOptionsTest, WhatIsDroppedForWantOfRoomIsCounted) {
  Start();
  const auto writer = Writer(0, 1, {}, kLong, 1);
  RankMemory memory({6000});
  Hold(true);
  ASSERT_TRUE(writer->Save(memory.Save(0, 0)));
  EXPECT_FALSE(writer->Save(memory.Save(1, 0)));
  EXPECT_EQ(writer->status().full_drops, 1u);
  while (status()["full_drops"] != 1) std::this_thread::yield();
  Hold(false);
}

TEST_F(SaveOptionsTest, ASaveIsCancelledUntilItIsHandedOver) {
  Start();
  const auto writer = Slow();
  RankMemory memory({3000, 3000, 3000});
  EXPECT_FALSE(writer->Cancel(5));
  ASSERT_TRUE(writer->Save(memory.Save(5, 0)));
  EXPECT_TRUE(writer->Cancel(5));
  writer->WaitBeforeUpdate();  // its memory may change though the copy has not moved
  Open();
  EXPECT_FALSE(writer->WaitDurable(5, kLong));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("cancelled"));
  EXPECT_TRUE(writer->TakeLog().empty());
  ASSERT_TRUE(writer->Save(memory.Save(6, 0)));
  EXPECT_TRUE(writer->WaitDurable(6, kLong));
  EXPECT_FALSE(writer->Cancel(6));
  ASSERT_EQ(kept().size(), 1u);
  EXPECT_EQ(kept()[0].step, 6u);
}

TEST_F(SaveOptionsTest, ASaveThatIsNotOverInItsTimeIsDropped) {
  Start();
  const auto writer = Writer();
  RankMemory memory({3000});
  ASSERT_TRUE(writer->Save(memory.Save(1, 0), milliseconds(0)));
  EXPECT_FALSE(writer->WaitDurable(1, kLong));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("its time limit has passed"));
  ASSERT_TRUE(writer->Save(memory.Save(2, 0), kLong));
  EXPECT_TRUE(writer->WaitDurable(2, kLong));
}

TEST_F(SaveOptionsTest, ItSaysHowFarItIs) {
  Start();
  const auto writer = Slow();
  RankMemory memory({6000, 10});
  const uint64_t bytes = memory.Truth(1, 0, 1).size();
  EXPECT_EQ(writer->Progress(1).bytes, 0u);
  ASSERT_TRUE(writer->Save(memory.Save(1, 0)));
  EXPECT_EQ(writer->Progress(1).bytes, bytes);
  EXPECT_EQ(writer->Progress(1).copied, 0u);
  Open();
  ASSERT_TRUE(writer->WaitDurable(1, kLong));
  EXPECT_EQ(writer->Progress(1).copied, bytes);
  EXPECT_EQ(writer->Progress(1).durable, bytes);
}

TEST_F(SaveOptionsTest, ADryRunSaysWhatIsNeeded) {
  const auto writer = Writer();  // without a daemon
  RankMemory memory({6000, 10});
  const auto size = writer->SizeOf(memory.Save(1, 0));
  ASSERT_TRUE(size);
  EXPECT_EQ(size->file_bytes, memory.Truth(1, 0, 1).size());
  EXPECT_EQ(size->lazy_bytes, 24'000u);
  EXPECT_EQ(size->arena_bytes, 2 * kArenaChunkBytes);
  EXPECT_EQ(writer->status().saves, 0u);
}

}  // namespace
}  // namespace ckptfs
