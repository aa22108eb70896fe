// SPDX-License-Identifier: Apache-2.0
//
// Only saves that the store does not take at once go to a disk of this node, on their way from
// memory to the store.
#include "snapshot/landing/spooler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "core/store/prepared_sweep.h"
#include "mount/daemon/snapshot_status.h"
#include "tests/snapshot/nodes.h"
#include "tests/snapshot/parts.h"
#include "tests/snapshot/spooling.h"
#include "tests/support/faulty_storage.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::ExpectWhole;
using testing_support::kNever;
using testing_support::Parts;
using testing_support::PartsOptions;
using testing_support::RankFileOf;
using testing_support::Save;
using testing_support::SavePtr;
using testing_support::Settled;

class SpoolerTest : public testing::Test {
 protected:
  void Start(std::chrono::milliseconds patience, uint64_t budget = 1 << 20,
             std::chrono::milliseconds pause = std::chrono::milliseconds(1)) {
    SpoolerOptions options;
    options.budget = budget;
    options.patience = patience;
    options.retry = {.pause = pause, .most = pause};
    options.log = [this](std::string_view line) { log_.emplace_back(line); };
    spooler_ = std::make_unique<Spooler>(*Spool::OpenOn(faulty_, "store"), std::move(options));
  }
  nlohmann::json status() const { return ToJson(spooler_->status()); }
  // It is on the disk, and what is there is counted.
  void Await(const Save& save) const {
    while (save.InMemory() || !save.bytes->on_disk()) std::this_thread::yield();
    const uint64_t left = spooler_->left().size();
    while (status()["saves"].get<uint64_t>() > status()["spooled"].get<uint64_t>() + left) {
      std::this_thread::yield();
    }
  }

  const std::shared_ptr<MemoryRoot> disk_ = std::make_shared<MemoryRoot>("disk");
  const std::shared_ptr<FaultyStorage> faulty_ = std::make_shared<FaultyStorage>(disk_);
  std::vector<std::string> log_;
  std::unique_ptr<Spooler> spooler_;
};

TEST_F(SpoolerTest, OnlyWhatTheStoreDoesNotTakeAtOnceGoesThere) {
  Start(kNever);
  const Save first(1), second(2), third(3);
  spooler_->Add(first.bytes);
  spooler_->Begin(*first.bytes);
  spooler_->Add(second.bytes);
  Await(second);
  EXPECT_THAT(*second.places, ElementsAre(second.part().Directory(), second.part().Directory()));
  EXPECT_TRUE(first.InMemory());
  EXPECT_FALSE(first.bytes->on_disk());
  ExpectWhole(*second.bytes, second.part());
  EXPECT_EQ(status()["saves"], 1);
  spooler_->Over(*first.bytes);
  spooler_->Add(third.bytes);  // the second waits still
  Await(third);
  spooler_->Over(*second.bytes);
  spooler_->Over(*third.bytes);
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
  EXPECT_EQ(status()["bytes"], 0);
  EXPECT_EQ(status()["spooled"], 2);
  const Save fourth(4);
  spooler_->Add(fourth.bytes);
  EXPECT_TRUE(fourth.InMemory());
}

TEST_F(SpoolerTest, AStoreThatFailsOrIsSlowGetsItFromThere) {
  Start(kNever);
  const Save failed(1);
  spooler_->Add(failed.bytes);
  const auto reader = *failed.bytes->Open(failed.part().PathOf(0));
  spooler_->Fails(*failed.bytes);
  Await(failed);
  // A reader that had it open reads the disk now, and goes on when the save is over.
  spooler_->Over(*failed.bytes);
  std::string bytes(reader->size(), '\0');
  ASSERT_TRUE(reader->ReadAt(0, std::as_writable_bytes(std::span(bytes))));
  EXPECT_TRUE(bytes == RankFileOf(1, 0, 2));
  spooler_.reset();
  Start(std::chrono::milliseconds(0));
  const Save slow(2);
  spooler_->Add(slow.bytes);
  spooler_->Begin(*slow.bytes);
  Await(slow);
}

TEST_F(SpoolerTest, WhatHasNoRoomStaysInMemoryUntilThereIs) {
  const Save first(1), second(2);
  Start(std::chrono::milliseconds(0), BytesOf(first.part()) + 1);
  spooler_->Add(first.bytes);
  Await(first);
  spooler_->Add(second.bytes);
  while (status()["full"] != 1) std::this_thread::yield();
  EXPECT_TRUE(second.InMemory());
  EXPECT_FALSE(spooler_->Leave(*second.bytes));
  EXPECT_EQ(status()["full"], 1);
  spooler_->Over(*first.bytes);
  Await(second);
  EXPECT_TRUE(spooler_->Leave(*second.bytes));
}

TEST_F(SpoolerTest, ADiskThatFailsIsTriedAgainAndSaidOnce) {
  Start(std::chrono::milliseconds(0));
  const uint64_t before = faulty_->calls();
  faulty_->FailAt(1, ErrorCode::kExhausted);
  const Save save(1);
  spooler_->Add(save.bytes);
  Await(save);
  EXPECT_GT(faulty_->calls(), before);
  EXPECT_EQ(status()["failed"], 1);
  EXPECT_EQ(status()["bytes"], BytesOf(save.part()));
  spooler_.reset();
  EXPECT_THAT(log_, ElementsAre(HasSubstr("spool: saves stay in memory: ")));
}

TEST_F(SpoolerTest, AtTheEndAllGoesThereAndNothingFurther) {
  Start(kNever);
  const Save save(1);
  spooler_->Add(save.bytes);
  const auto reader = *save.bytes->Open(save.part().PathOf(0));
  spooler_->End();
  EXPECT_TRUE(spooler_->Leave(*save.bytes));
  EXPECT_TRUE(save.bytes->stays());
  std::byte byte{};
  EXPECT_FALSE(reader->ReadAt(0, {&byte, 1}));
  spooler_.reset();
  Start(kNever);
  ASSERT_EQ(spooler_->left().size(), 1u);
  EXPECT_TRUE(spooler_->left()[0]->left());
  ExpectWhole(*spooler_->left()[0], save.part());
  EXPECT_EQ(status()["bytes"], BytesOf(save.part()));
}

TEST_F(SpoolerTest, WhatComesAtTheEndGoesThereToo) {
  Start(kNever);
  spooler_->End();
  const Save save(1);
  const auto reader = *save.bytes->Open(save.part().PathOf(0));
  spooler_->Add(save.bytes);
  spooler_->Begin(*save.bytes);  // the store has no more time for it
  Await(save);
  std::byte byte{};
  EXPECT_FALSE(reader->ReadAt(0, {&byte, 1}));
  EXPECT_TRUE(spooler_->Leave(*save.bytes));
}

// The thread takes them in order: when the second has been tried, the first would have been.
TEST_F(SpoolerTest, AStoreThatFailsDoesNotHurryADiskThatFails) {
  Start(std::chrono::milliseconds(0), 1 << 20, kNever);
  faulty_->FailFrom(1);
  const Save first(1), second(2);
  spooler_->Add(first.bytes);
  while (status()["failed"] != 1) std::this_thread::yield();
  faulty_->Mend();
  spooler_->Fails(*first.bytes);
  spooler_->Add(second.bytes);
  Await(second);
  EXPECT_FALSE(first.bytes->on_disk());
  EXPECT_TRUE(first.InMemory());
  EXPECT_TRUE(spooler_->Leave(*first.bytes));  // the daemon's end does
}

TEST_F(SpoolerTest, WhatTheStoreHasIsNotWritten) {
  Start(kNever);
  const Save first(1), second(2);
  spooler_->Add(first.bytes);
  spooler_->Stored(*first.bytes);
  EXPECT_FALSE(spooler_->waits());
  spooler_->End();
  spooler_->Add(second.bytes);
  Await(second);
  EXPECT_FALSE(first.bytes->on_disk());
  EXPECT_EQ(status()["spooled"], 1);
}

// After any failure, also of reading it again, the save is in memory and not on the disk.
TEST_F(SpoolerTest, ADiskThatFailsHasNothing) {
  uint64_t failed = 0;
  for (bool fails = true; fails; failed += fails ? 1 : 0) {
    Start(std::chrono::milliseconds(0), 1 << 20, kNever);
    faulty_->FailAt(failed + 1);
    const Save save(1);
    spooler_->Add(save.bytes);
    while (status()["failed"] == 0 && status()["spooled"] == 0) std::this_thread::yield();
    fails = status()["failed"] == 1;
    EXPECT_EQ(save.InMemory(), fails);
    EXPECT_EQ(ListFilesBelow(*disk_, "")->size(), fails ? 1u : 4u) << failed;
    spooler_.reset();
  }
  EXPECT_GT(failed, 8u);
}

// Then it is the store's to refuse them.
TEST_F(SpoolerTest, BytesThatChangedAreTriedOnce) {
  Start(std::chrono::milliseconds(0));
  const Save changed(1), other(2);
  {
    const auto text = changed.memory[1].lock();
    (*text)[500] = static_cast<char>((*text)[500] ^ 1);
  }
  spooler_->Add(changed.bytes);
  spooler_->Add(other.bytes);
  Await(other);
  EXPECT_TRUE(changed.InMemory());
  const uint64_t calls = faulty_->calls();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // many pauses
  EXPECT_EQ(faulty_->calls(), calls);
  EXPECT_EQ(status()["failed"], 0);
  EXPECT_EQ(status()["last_failure"], "");
  EXPECT_FALSE(spooler_->Leave(*changed.bytes));
  spooler_.reset();
  EXPECT_THAT(log_, ElementsAre());
}

TEST_F(SpoolerTest, ADiskThatGoesOnFailingIsSaidOnce) {
  Start(std::chrono::milliseconds(0));
  faulty_->FailFrom(1);
  const Save save(1);
  spooler_->Add(save.bytes);
  while (status()["failed"] < 3) std::this_thread::yield();
  faulty_->Mend();
  Await(save);
  EXPECT_EQ(status()["last_failure"], "");
  spooler_.reset();
  EXPECT_THAT(log_, ElementsAre(HasSubstr("spool: saves stay in memory: ")));
}

TEST_F(SpoolerTest, WhatIsOverWhileItIsWrittenGoes) {
  Start(std::chrono::milliseconds(0));
  faulty_->SetDelay(std::chrono::milliseconds(20));
  const Save save(1);
  spooler_->Add(save.bytes);
  while (status()["bytes"] == 0) std::this_thread::yield();
  spooler_->Over(*save.bytes);
  spooler_.reset();
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

TEST_F(SpoolerTest, AtTheEndNothingHasTime) {
  Start(kNever);
  const Save first(1), second(2);
  spooler_->Add(first.bytes);
  spooler_->End();
  spooler_->Add(second.bytes);
  Await(second);
  EXPECT_TRUE(first.bytes->on_disk());
}

// A mapping would keep the arena.
TEST_F(SpoolerTest, WhatMayMoveIsNotMapped) {
  Start(kNever);
  const auto text = std::make_shared<std::string>(RankFileOf(1, 0, 2));
  ReceivedFile file{
      text->size(), {std::as_bytes(std::span(*text))}, ChunkDigestsOf(*text), false, text};
  const auto save = std::make_shared<SaveBytes>(AttemptName{"run", "job", 1, RandomDigest()}, 1, 2);
  ASSERT_TRUE(save->Add(0, file));
  const auto reader = *save->Open(save->part().PathOf(0));
  EXPECT_EQ(*reader->Map(), nullptr);
  spooler_->Add(save);
  ASSERT_TRUE(spooler_->Leave(*save));
  EXPECT_EQ(text.use_count(), 1);
  const auto mapped = *reader->Map();
  ASSERT_NE(mapped, nullptr);
  EXPECT_TRUE(std::ranges::equal(mapped->bytes(), std::as_bytes(std::span(*text))));
}

// ---- parts of steps of several nodes -------------------------------------------

class SpooledPartTest : public SpoolerTest {
 protected:
  PartsOptions OptionsOf(const testing_support::Node& node) {
    return {.commit = node.commit.get(), .spooler = spooler_.get()};
  }
  // Its store is looked at only when it is handed something.
  PartsOptions Rarely(const testing_support::Node& node) {
    PartsOptions options = OptionsOf(node);
    options.turn = kNever;
    return options;
  }
  // Rank 0 of two, in memory.
  SavePtr Part() {
    auto text = std::make_shared<std::string>(RankFileOf(5, 0, 2));
    ReceivedFile file{
        text->size(), {std::as_bytes(std::span(*text))}, ChunkDigestsOf(*text), false, text};
    memory_ = text;
    auto save = std::make_shared<SaveBytes>(testing_support::AttemptOf(1, 2), 5, 2);
    EXPECT_TRUE(save->Add(0, file));
    return save;
  }
  void LeaveInSpool() {
    const auto spool = Spool::OpenOn(disk_, "store");
    const SavePtr part = Part();
    ASSERT_TRUE(spool->spool->Write(part->part(), *part));
  }
  std::weak_ptr<std::string> memory_;
};

TEST_F(SpooledPartTest, ItWaitsThereForTheStoreAndForTheOthers) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  const auto away = std::make_shared<FaultyStorage>(disk);
  const testing_support::Node other(disk);
  Start(std::chrono::milliseconds(0));
  {
    const testing_support::Node node(away);
    away->StopAt(1, false);
    const Parts parts(OptionsOf(node));
    parts.Hand(Part());
    while (!memory_.expired()) std::this_thread::yield();
    EXPECT_TRUE(parts.Has({"run", "job", 1}));
    EXPECT_FALSE(parts.Has({"run", "job", 2}));
    parts->StopWorlds();
    EXPECT_TRUE(parts.Told().empty());  // neither durable nor dropped
  }
  spooler_.reset();
  Start(std::chrono::milliseconds(0));
  ASSERT_EQ(spooler_->left().size(), 1u);

  const testing_support::Node next(disk);
  {
    const Parts parts(OptionsOf(next));
    while (parts.Waiting() != std::vector<std::string>{"run/5: waiting for rank 1"}) {
      std::this_thread::yield();
    }
    EXPECT_FALSE(spooler_->waits());  // for the others, not for the store
    ASSERT_TRUE(other.Prepare(testing_support::AttemptOf(1, 2), 5, {1}, 2));
    EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
  }
  EXPECT_TRUE(testing_support::IsStepThere(disk, "5", 5, 2));
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
  EXPECT_EQ(status()["saves"], 0);
  EXPECT_EQ(status()["bytes"], 0);
}

// As ranks do that were not told what became of it.
TEST_F(SpooledPartTest, WhatIsHandedOverAgainIsOnePart) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  LeaveInSpool();
  Start(kNever);
  const testing_support::Node node(disk), other(disk);
  {
    const Parts parts(OptionsOf(node));
    while (parts.Waiting() != std::vector<std::string>{"run/5: waiting for rank 1"}) {
      std::this_thread::yield();
    }
    parts.Hand(Part());
    EXPECT_THAT(parts.Waiting(), ElementsAre("run/5: waiting for rank 1"));
    ASSERT_TRUE(other.Prepare(testing_support::AttemptOf(1, 2), 5, {1}, 2));
    EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
    parts->StopWorlds();
    EXPECT_TRUE(parts.Told().empty());
  }
}

TEST_F(SpooledPartTest, AStoreThatFailsGetsItFromThere) {
  const auto away = std::make_shared<FaultyStorage>();
  Start(kNever);
  const testing_support::Node node(away);
  Parts parts(Rarely(node));
  away->FailAt(1);
  parts.Hand(Part());
  EXPECT_THAT(parts.AwaitLine(), HasSubstr("run/5 stays in "));  // memory, or the spool by now
  const Save other(6);
  spooler_->Add(other.bytes);
  Await(other);
  EXPECT_TRUE(memory_.expired());
}

// Though the store could take it by now: it may be slow.
TEST_F(SpooledPartTest, AtTheEndItStaysThere) {
  const auto away = std::make_shared<FaultyStorage>();
  Start(kNever);
  const testing_support::Node node(away);
  Parts parts(Rarely(node));
  away->FailAt(1);
  const SavePtr save = Part();
  parts.Hand(save);
  (void)parts.AwaitLine();
  parts->StopWorlds();
  EXPECT_TRUE(save->stays());
  EXPECT_THAT(*ListFilesBelow(*away, kPreparedFolder), ElementsAre());
  EXPECT_TRUE(parts.Told().empty());
}

TEST_F(SpooledPartTest, AStoreThatFailsWhileTheDaemonEndsDropsNothing) {
  const auto away = std::make_shared<FaultyStorage>();
  Start(kNever);
  const testing_support::Node node(away);
  const Parts parts(Rarely(node));
  away->SetDelay(std::chrono::milliseconds(200));
  away->FailFrom(1);
  const uint64_t before = away->calls();
  const SavePtr save = Part();
  parts.Hand(save);
  while (away->calls() == before) std::this_thread::yield();
  parts->StopWorlds();
  EXPECT_TRUE(save->stays());
  EXPECT_TRUE(parts.Told().empty());
}

// Patience is for what takes up memory.
TEST_F(SpooledPartTest, WhatIsThereMayBeLate) {
  const auto away = std::make_shared<FaultyStorage>();
  LeaveInSpool();
  Start(kNever);
  const testing_support::Node node(away);
  ASSERT_TRUE(node.Prepare(testing_support::AttemptOf(1, 2), 5, {1}, 2));
  PartsOptions options = OptionsOf(node);
  options.patience = options.limit = std::chrono::milliseconds(0);
  away->FailFrom(1);
  Parts parts(options);
  EXPECT_THAT(parts.AwaitLine(), HasSubstr("run/5 stays in the spool: "));
  away->Mend();
  EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
}

// Its daemon died when the step was there, before the spool had forgotten it.
TEST_F(SpooledPartTest, WhatIsAStepAlreadyIsNotPreparedAgain) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  LeaveInSpool();
  Start(std::chrono::milliseconds(0));
  const testing_support::Node node(disk);
  PartsOptions options = OptionsOf(node);
  options.found = [](const PreparedPart&) { return true; };
  const Parts parts(options);
  EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
  EXPECT_THAT(*ListFilesBelow(*disk, kPreparedFolder), ElementsAre());
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

// The daemon of rank 1 publishes right after this one looked; all records go before this one's
// own is there.
TEST_F(SpooledPartTest, WhatBecameAStepBeforeOurRecordWasThereIsDurable) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  LeaveInSpool();
  Start(kNever);
  const testing_support::Node node(disk);
  auto other = std::make_unique<testing_support::Node>(disk);
  PartsOptions options = OptionsOf(node);
  options.patience = std::chrono::milliseconds(0);
  int looks = 0;
  options.found = [&](const PreparedPart&) -> Result<bool> {
    if (++looks > 1) return testing_support::IsStepThere(disk, "5", 5, 2);
    const AttemptName name = testing_support::AttemptOf(1, 2);
    EXPECT_TRUE(testing_support::Node(disk).Prepare(name, 5, {0}, 2));  // our earlier daemon
    EXPECT_TRUE(other->Prepare(name, 5, {1}, 2));
    EXPECT_EQ(other->commit->Look(name, true)->state, AttemptNews::State::kDurable);
    other.reset();
    for (int sweeps = 0; sweeps < 2; ++sweeps) {
      PresenceWatch watch;
      EXPECT_TRUE(SweepPrepared(*disk, "", watch, false));
    }
    EXPECT_THAT(*ListFilesBelow(*disk, kPreparedFolder), ElementsAre());
    return false;
  };
  const Parts parts(options);
  EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
  EXPECT_THAT(*ListFilesBelow(*disk, kPreparedFolder), ElementsAre());
}

// Its earlier daemon's record is there and goes; this one's keeps what became of the save.
TEST_F(SpooledPartTest, WhatBecomesAStepWhileWeWaitIsNotForgotten) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  const AttemptName name = testing_support::AttemptOf(1, 2);
  ASSERT_TRUE(testing_support::Node(disk).Prepare(name, 5, {0}, 2));
  LeaveInSpool();
  Start(kNever);
  const testing_support::Node node(disk), other(disk), third(disk);
  PartsOptions options = OptionsOf(node);
  options.turn = kNever;
  options.found = [](const PreparedPart&) { return false; };  // not yet
  const Parts parts(options);
  while (parts.Waiting() != std::vector<std::string>{"run/5: waiting for rank 1"}) {
    std::this_thread::yield();
  }
  ASSERT_TRUE(other.Prepare(name, 5, {1}, 2));
  ASSERT_EQ(other.commit->Look(name, true)->state, AttemptNews::State::kDurable);
  PresenceWatch watch;
  ASSERT_TRUE(SweepPrepared(*disk, "", watch, false));
  ASSERT_EQ(third.commit->Look(name, false)->state, AttemptNews::State::kDurable);
  ASSERT_TRUE(other.commit->FinishOthers(WorldCommit::Clock::now(), kNever));
  parts->See({"run", "job", 2, "", {{0, 100}}});  // another turn
  EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
}

// A store that cannot say whether it has the step is asked again.
TEST_F(SpooledPartTest, AStoreThatDoesNotSayWhetherItIsAStepIsAskedAgain) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  LeaveInSpool();
  Start(kNever);
  const testing_support::Node node(disk);
  PartsOptions options = OptionsOf(node);
  int looks = 0;
  options.found = [&](const PreparedPart&) -> Result<bool> {
    if (++looks < 3) return Fail(ErrorCode::kIo, "the store is away");
    return true;
  };
  const Parts parts(options);
  EXPECT_EQ(parts.Await(), (Settled{{5, ""}}));
  EXPECT_THAT(*ListFilesBelow(*disk, kPreparedFolder), ElementsAre());
}

TEST_F(SpooledPartTest, WhatOthersDroppedGoes) {
  const auto disk = std::make_shared<MemoryRoot>("store");
  Start(kNever);
  const testing_support::Node node(disk), other(disk);
  const Parts parts(OptionsOf(node));
  ASSERT_TRUE(other.commit->Drop(testing_support::AttemptOf(1, 2), 5, "a reason"));
  parts.Hand(Part());
  EXPECT_EQ(parts.Await(), (Settled{{5, "a reason"}}));
  EXPECT_TRUE(memory_.expired());
  EXPECT_EQ(status()["spooled"], 0);
}

}  // namespace
}  // namespace ckptfs
