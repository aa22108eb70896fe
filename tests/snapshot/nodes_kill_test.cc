// SPDX-License-Identifier: Apache-2.0
//
// Two receivers over one store, as on two nodes, each with a rank of one job.  Either is
// killed at every point that it reaches (core/base/fault_point.h): the step is whole or not
// there, whoever lives is told which, and the next save works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "core/io/blob_directories.h"
#include "core/io/file_storage.h"
#include "core/store/collect.h"
#include "core/store/step_catalogue.h"
#include "tests/snapshot/killed.h"
#include "tests/snapshot/nodes.h"
#include "tests/snapshot/receiving.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing_support::CaptureOf;
using testing_support::ExpectVerified;
using testing_support::IsStepThere;
using testing_support::kForks;
using testing_support::Killed;
using testing_support::kLong;
using testing_support::kMostPoints;
using testing_support::RecordsIn;

// A daemon as the ranks of one node find it.
std::string SocketOf(const std::string& store, uint32_t node) { return StrCat(store, "/", node); }

class NodeDaemon {
 public:
  NodeDaemon(const std::string& directory, uint32_t node,
             std::chrono::milliseconds patience = kLong)
      : store_(*Store::Open(directory, true)),
        catalogue_(*store_),
        keeper_(*store_, catalogue_, [](const StepRecord&) { return Status(); }),
        commit_(std::make_unique<WorldCommit>(*store_, ModelOfRankFiles())),
        landing_({.steps = &keeper_,
                  .commit = commit_.get(),
                  .patience = patience,
                  .turn = std::chrono::milliseconds(10)}) {
    ReceiverOptions options;
    options.store = SocketOf(directory, node);
    options.memory_bytes = 4 << 20;
    options.chunk_bytes = testing_support::kSmallChunk;
    options.patience = patience;
    options.landing = &landing_;
    receiver_ = *Receiver::Start(std::move(options));
  }
  nlohmann::json status() const { return ToJson(receiver_->status()); }

 private:
  const std::unique_ptr<Store> store_;
  StepCatalogue catalogue_;
  SnapshotKeeper keeper_;
  std::unique_ptr<WorldCommit> commit_;
  Landing landing_;
  std::unique_ptr<Receiver> receiver_;
};

class NodesTest : public testing::Test {
 protected:
  WriterOptions Options(uint32_t rank, const std::string& job = "job", uint32_t world = 2) const {
    return {SocketOf(directory_.path(), rank), "run", job, rank, world, 2, kLong, {}};
  }
  static bool Save(SnapshotWriter& writer, uint64_t step, uint32_t rank) {
    const bool taken = writer.Save(CaptureOf(step, rank));
    writer.WaitBeforeUpdate();
    return taken;
  }
  bool IsStored(uint64_t step) const {
    const auto store = *Store::Open(directory_.path(), true);
    if (const auto record = store->Resolve("run", StrCat(step)))
      ExpectVerified(**store->Load(*record));
    return IsStepThere(Disk(), StrCat(step), step, 2);
  }
  std::shared_ptr<Storage> Disk() const {
    return std::shared_ptr<Storage>(*FileStorage::Open(directory_.path(), true));
  }
  std::function<void(std::function<void()>)> Daemon(uint32_t node) const {
    return [this, node](const std::function<void()>& ready) {
      const NodeDaemon one(directory_.path(), node);
      ready();
    };
  }
  void KillAtEveryPoint(uint32_t victim);

  TemporaryDirectory directory_;
};

void NodesTest::KillAtEveryPoint(uint32_t victim) {
  const uint32_t other = 1 - victim;
  SnapshotWriter dying(Options(victim)), living(Options(other));
  Killed survivor(0, Daemon(other));
  survivor.WaitUntilReady();
  bool killed = true;
  uint64_t stored = 0, at = 1;
  for (; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    Killed first(at, Daemon(victim));
    first.WaitUntilReady();
    EXPECT_TRUE(Save(living, 10 * at, other));
    const bool taken = Save(dying, 10 * at, victim);
    while (dying.status().under_way > 0 && !first.IsDead()) std::this_thread::yield();
    killed = first.End();
    EXPECT_TRUE(taken || killed);

    Killed second(0, Daemon(victim));
    second.WaitUntilReady();
    // The arena has outlived its daemon.
    EXPECT_EQ(taken, dying.WaitDurable(10 * at, kLong)) << dying.status().last_drop;
    EXPECT_TRUE(Save(living, 10 * at + 1, other)) << living.status().last_drop;
    EXPECT_TRUE(Save(dying, 10 * at + 1, victim)) << dying.status().last_drop;
    EXPECT_TRUE(dying.WaitDurable(10 * at + 1, kLong)) << dying.status().last_drop;
    EXPECT_TRUE(living.WaitDurable(10 * at + 1, kLong)) << living.status().last_drop;
    EXPECT_TRUE(IsStored(10 * at + 1));
    // Longer than the daemon's own patience, so that it has spoken.
    EXPECT_EQ(taken, living.WaitDurable(10 * at, 2 * kLong)) << living.status().last_drop;
    EXPECT_EQ(living.status().under_way, 0u) << "the survivor's rank has to be told";
    EXPECT_EQ(taken, IsStored(10 * at));
    stored += taken ? 1 : 0;
    EXPECT_FALSE(second.End());
    while (dying.status().connected) std::this_thread::yield();
  }
  EXPECT_GT(stored, 1u);
  // Nothing is left of those that were killed, but what their daemon still has to forget.
  EXPECT_FALSE(survivor.End());
  const auto store = *Store::Open(directory_.path(), true);
  const auto report = store->Collect({});
  ASSERT_TRUE(report);
  EXPECT_THAT(report->notes, testing::IsEmpty());
  EXPECT_THAT(RecordsIn(*Disk()), testing::IsEmpty());
  EXPECT_THAT(*ListFilesBelow(*Disk(), kNodesFolder), testing::IsEmpty());
  const auto steps = store->Steps("run");
  ASSERT_TRUE(steps);
  EXPECT_EQ(ListBlobDirectories(directory_.path())->size(), steps->size());
}

TEST_F(NodesTest, TheDaemonOfRank0AtEveryPoint) {
  if (!kForks) GTEST_SKIP();
  KillAtEveryPoint(0);
}

TEST_F(NodesTest, TheDaemonOfRank1AtEveryPoint) {
  if (!kForks) GTEST_SKIP();
  KillAtEveryPoint(1);
}

// The processes of a job: rank 1's is killed at every point that it reaches.
TEST_F(NodesTest, ARankAtEveryPoint) {
  if (!kForks) GTEST_SKIP();
  bool killed = true;
  uint64_t stored = 0, at = 1;
  for (; killed; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, kMostPoints);
    const auto rank = [&](uint32_t number) {
      return [this, number, at](const std::function<void()>& ready) {
        ready();
        SnapshotWriter writer(Options(number, StrCat("life", at)));
        const bool taken = Save(writer, at, number);
        if (taken && !writer.WaitDurable(at, kLong) && writer.status().under_way != 0) _exit(3);
      };
    };
    // Forked while this process has no thread but this one.
    Killed first(0, rank(0)), second(at, rank(1));
    const NodeDaemon a(directory_.path(), 0);
    const NodeDaemon b(directory_.path(), 1);
    first.WaitUntilReady();
    second.WaitUntilReady();
    first.Go();
    killed = second.End();
    auto knows = b.status();
    for (; knows["ranks"] != 0; knows = b.status()) std::this_thread::yield();
    const bool stranger = killed && knows["incoming"] == 0 && knows["dropped"] == 0 &&
                          knows["durable"] == 0 && knows["steps"].empty();
    if (stranger) first.Kill();  // nobody can tell it before its time is over
    EXPECT_EQ(first.End(), stranger) << "it is told what became of the step";
    for (const NodeDaemon* daemon : {&a, &b}) {
      while (daemon->status()["ranks"] != 0 || daemon->status()["waiting"] != 0 ||
             !(stranger || daemon->status()["steps"].empty())) {
        std::this_thread::yield();
      }
    }
    const bool there = IsStored(at);
    EXPECT_TRUE(there || killed);
    stored += there ? 1 : 0;
    EXPECT_EQ(a.status()["durable"], there ? 1 : 0);
  }
  EXPECT_GT(stored, 1u);
  EXPECT_LT(stored, at / 2);
}

TEST_F(NodesTest, ARankThatNeverArrivesIsNamed) {
  const NodeDaemon a(directory_.path(), 0, std::chrono::milliseconds(300));
  const NodeDaemon b(directory_.path(), 1);
  SnapshotWriter first(Options(0)), second(Options(1));
  // Rank 1 is known, and then does not save.
  uint64_t step = 0;
  bool durable = false;
  while (!durable) {  // a busy machine is late, too, and has no room for the next while a late one
                      // goes
    ++step;
    durable = Save(first, step, 0) && Save(second, step, 1) && first.WaitDurable(step, kLong) &&
              second.WaitDurable(step, kLong);
  }
  ++step;
  ASSERT_TRUE(Save(first, step, 0));
  EXPECT_FALSE(first.WaitDurable(step, kLong));
  EXPECT_THAT(first.status().last_drop, testing::HasSubstr("nothing came from rank 1"));
  EXPECT_THAT(a.status()["last_drop"].get<std::string>(), testing::HasSubstr("rank 1"));
  EXPECT_FALSE(IsStored(step));
  // Its part comes too late.
  ASSERT_TRUE(Save(second, step, 1));
  EXPECT_FALSE(second.WaitDurable(step, kLong));
  EXPECT_THAT(second.status().last_drop, testing::HasSubstr("nothing came from rank 1"));
  EXPECT_FALSE(IsStored(step));
}

TEST_F(NodesTest, WhoeverAsksIsToldWhichRanksAreWaitedFor) {
  const NodeDaemon a(directory_.path(), 0);
  const NodeDaemon b(directory_.path(), 1);
  SnapshotWriter first(Options(0)), second(Options(1));
  ASSERT_TRUE(Save(first, 1, 0) && Save(second, 1, 1));
  ASSERT_TRUE(first.WaitDurable(1, kLong) && second.WaitDurable(1, kLong));
  ASSERT_TRUE(Save(second, 2, 1));
  const nlohmann::json waiting = {"run/2: waiting for rank 0"};
  while (b.status()["steps"] != waiting) std::this_thread::yield();
  EXPECT_TRUE(a.status()["steps"].empty());
  ASSERT_TRUE(Save(first, 2, 0));
  EXPECT_TRUE(second.WaitDurable(2, kLong));
  while (!b.status()["steps"].empty()) std::this_thread::yield();  // once it has told the rank
}

TEST_F(NodesTest, WhatARankDropsIsDroppedOnAllNodesAtOnce) {
  const NodeDaemon a(directory_.path(), 0), b(directory_.path(), 1);
  SnapshotWriter first(Options(0)), second(Options(1));
  ASSERT_TRUE(Save(first, 1, 0) && Save(second, 1, 1));
  ASSERT_TRUE(first.WaitDurable(1, kLong) && second.WaitDurable(1, kLong));
  ASSERT_TRUE(Save(first, 2, 0));
  second.Drop(2, "its sums are wrong");
  EXPECT_FALSE(first.WaitDurable(2, kLong));
  EXPECT_THAT(first.status().last_drop, testing::HasSubstr("rank 1: its sums are wrong"));
  ASSERT_TRUE(Save(first, 3, 0) && Save(second, 3, 1));
  EXPECT_TRUE(first.WaitDurable(3, kLong) && second.WaitDurable(3, kLong));
  EXPECT_TRUE(IsStored(3));
}

// The next one saves the same step, under the same number.
TEST_F(NodesTest, WhatAnEarlierLifeLeftDropsNothingOfTheNext) {
  const NodeDaemon a(directory_.path(), 0), b(directory_.path(), 1);
  const auto told = [&] {  // of the ranks that each node has
    std::string all;
    const auto files = ListFilesBelow(*Disk(), kNodesFolder);
    for (const std::string& path : *files) {
      all += StrCat(path, "\n", ReadWhole(*Disk(), path, 1 << 20).value_or(""));
    }
    return all;
  };
  {
    SnapshotWriter gone(Options(0));
    ASSERT_TRUE(Save(gone, 5, 0));
    while (told().empty()) std::this_thread::yield();
  }
  while (a.status()["ranks"] != 0) std::this_thread::yield();
  const std::string before = told();
  SnapshotWriter first(Options(0)), second(Options(1));
  ASSERT_TRUE(Save(first, 5, 0)) << first.status().last_drop;
  while (told() == before) std::this_thread::yield();
  ASSERT_TRUE(Save(second, 5, 1));
  EXPECT_TRUE(first.WaitDurable(5, kLong)) << first.status().last_drop;
  EXPECT_TRUE(second.WaitDurable(5, kLong)) << second.status().last_drop;
  EXPECT_TRUE(IsStored(5));
}

// Two jobs write one step number of one run at the same time, each over both nodes.
TEST_F(NodesTest, TwoJobsOfOneStepNumberAreTwoSteps) {
  const NodeDaemon a(directory_.path(), 0), b(directory_.path(), 1);
  SnapshotWriter one0(Options(0, "one")), one1(Options(1, "one"));
  SnapshotWriter two0(Options(0, "two")), two1(Options(1, "two"));
  ASSERT_TRUE(Save(one0, 7, 0) && Save(two1, 7, 1));
  ASSERT_TRUE(Save(two0, 7, 0) && Save(one1, 7, 1));
  for (SnapshotWriter* writer : {&one0, &one1, &two0, &two1}) {
    EXPECT_TRUE(writer->WaitDurable(7, kLong)) << writer->status().last_drop;
  }
  EXPECT_TRUE(IsStored(7));
  EXPECT_TRUE(IsStepThere(Disk(), "7-1", 7, 2));
}

// One rank of a world of two, another of a world of three, of what says to be one job.
TEST_F(NodesTest, RanksOfTwoWorldsMakeNoStep) {
  const NodeDaemon a(directory_.path(), 0), b(directory_.path(), 1);
  SnapshotWriter of_two(Options(0)), of_three(Options(1, "job", 3));
  ASSERT_TRUE(Save(of_two, 7, 0) && Save(of_three, 7, 1));
  while (of_two.status().dropped + of_three.status().dropped == 0) std::this_thread::yield();
  const std::string said = of_two.status().last_drop + of_three.status().last_drop;
  EXPECT_THAT(said, testing::HasSubstr("the job has 2 ranks on"));
  EXPECT_FALSE(IsStored(7));
}

}  // namespace
}  // namespace ckptfs
