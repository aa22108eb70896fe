// SPDX-License-Identifier: Apache-2.0
//
// Steps of which several daemons over one store have some ranks each: whole once, from
// whomever, or not at all.
#include "core/commit/world_commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/io/blob_directories.h"
#include "core/io/file_storage.h"
#include "core/records/record_text.h"
#include "core/store/collect.h"
#include "core/store/prepared_sweep.h"
#include "core/store/store_index.h"
#include "tests/snapshot/nodes.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using State = AttemptNews::State;
using std::chrono::hours;
using std::chrono::seconds;
using testing::HasSubstr;
using testing_support::AttemptOf;
using testing_support::IsStepThere;
using testing_support::LifeOfWorld;
using testing_support::Node;
using testing_support::RankFileOf;
using testing_support::RecordsIn;

const AttemptName kSave = AttemptOf(1, 4);
constexpr uint64_t kListed = 150'000;  // elements of a rank whose file has a list of digests

std::shared_ptr<MemoryRoot> Disk() { return std::make_shared<MemoryRoot>("disk"); }

// Names below a folder but for those of daemons and their ranks.
std::vector<std::string> Left(const Storage& storage) {
  auto names = RecordsIn(storage);
  std::erase_if(names, [](const std::string& path) {
    const auto name = ParseCommitName(path);
    return name &&
           (name->kind == CommitName::Kind::kRanks || name->kind == CommitName::Kind::kWorld);
  });
  return names;
}

size_t StepsIn(const std::shared_ptr<Storage>& storage) {
  const auto steps = (*Store::OpenOn(storage))->Steps("run");
  return steps ? steps->size() : 0;
}

TEST(WorldCommitTest, AllRanksAreKnownOnceTheirDaemonsHaveSaidSo) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  auto world = a.Join({0, 1}, 4);
  ASSERT_TRUE(world) << world.error().message;
  EXPECT_FALSE(world->life);
  world = b.Join({2, 3}, 4);
  ASSERT_TRUE(world);
  EXPECT_FALSE(world->life) << "the daemon with rank 0 has still to gather it";
  world = a.Join({0, 1}, 4);
  ASSERT_TRUE(world && world->life);
  EXPECT_EQ(*world->life, LifeOfWorld(4));
  EXPECT_EQ(world->elsewhere.size(), 2u);
  world = b.Join({2, 3}, 4);
  ASSERT_TRUE(world && world->life);
  EXPECT_EQ(*world->life, LifeOfWorld(4));
  EXPECT_EQ(world->elsewhere.size(), 2u);
}

// The gathered record names other processes than ours: it is an earlier life's.
TEST(WorldCommitTest, WhatWasGatheredOfAnotherLifeIsNotOurs) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(b.Join({1}, 2));
  ASSERT_TRUE(a.Join({0}, 2)->life);
  ASSERT_TRUE(b.Join({1}, 2)->life);
  const Node next(disk);
  const auto world = next.Join({1}, 2, 900);
  ASSERT_TRUE(world);
  EXPECT_FALSE(world->life);
  EXPECT_TRUE(world->elsewhere.empty());
}

TEST(WorldCommitTest, WhoeverHasRank0ForgetsWhatWasGathered) {
  const auto disk = Disk();
  {
    const Node a(disk);
    ASSERT_TRUE(a.Join({0}, 1)->life);
    EXPECT_EQ(RecordsIn(*disk).size(), 2u);
  }
  EXPECT_THAT(RecordsIn(*disk), testing::IsEmpty());
}

// A collector may take a new leader's record for that of the one before, which is dead.
TEST(WorldCommitTest, AWorldThatSomebodyRemovedIsWrittenAgain) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(b.Join({1}, 2));
  ASSERT_TRUE(a.Join({0}, 2)->life);
  ASSERT_TRUE(disk->Remove(WorldName("run", "job")));
  EXPECT_FALSE(b.Join({1}, 2)->life);
  ASSERT_TRUE(b.commit->KeepWorlds());
  EXPECT_FALSE(b.Join({1}, 2)->life) << "it did not gather it";
  ASSERT_TRUE(a.commit->KeepWorlds());
  EXPECT_TRUE(b.Join({1}, 2)->life);
}

TEST(WorldCommitTest, TheStepIsThereOnceWithTheLastPart) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
  auto news = a.commit->Look(kSave, true);
  ASSERT_TRUE(news) << news.error().message;
  EXPECT_EQ(news->state, State::kWaiting);
  EXPECT_EQ(news->missing, (std::set<uint32_t>{2, 3}));
  EXPECT_FALSE(IsStepThere(disk, "7", 7, 4));
  ASSERT_TRUE(b.Prepare(kSave, 7, {2, 3}, 4));
  EXPECT_TRUE(b.commit->Look(kSave, false)->whole);
  news = b.commit->Look(kSave, true);
  ASSERT_TRUE(news) << news.error().message;
  EXPECT_EQ(news->state, State::kDurable);
  EXPECT_TRUE(news->published);
  EXPECT_TRUE(IsStepThere(disk, "7", 7, 4));
  const auto other = a.commit->Look(kSave, true);
  ASSERT_TRUE(other && other->record);
  EXPECT_FALSE(other->published);
  EXPECT_EQ(other->record->manifest, news->record->manifest);
  EXPECT_EQ(StepsIn(disk), 1u);
  EXPECT_THAT(Left(*disk), testing::ElementsAre(DoneName(kSave), OutcomeName(kSave)));
  ASSERT_TRUE(b.commit->FinishOthers(WorldCommit::Clock::now(), seconds(30)));
  EXPECT_THAT(Left(*disk), testing::IsEmpty());
}

TEST(WorldCommitTest, WhatWasDoneBeforeIsNoError) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  for (int again = 0; again < 2; ++again) {
    ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
    ASSERT_TRUE(b.Prepare(kSave, 7, {2, 3}, 4));
  }
  const auto parts = Left(*disk);
  const std::string first = *ReadWhole(*disk, parts[0], 1 << 20);
  const std::string second = *ReadWhole(*disk, parts[1], 1 << 20);
  ASSERT_EQ(a.commit->Look(kSave, true)->state, State::kDurable);
  // As b had seen it when it began to publish the same.
  ASSERT_TRUE(disk->Remove(DoneName(kSave)));
  (void)PublishText(*disk, parts[0], first);
  (void)PublishText(*disk, parts[1], second);
  const auto again = b.commit->Look(kSave, true);
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->state, State::kDurable);
  EXPECT_EQ(again->record->id, "7");
  EXPECT_EQ(StepsIn(disk), 1u);
}

TEST(WorldCommitTest, AnotherPartOfARankIsRefused) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
  EXPECT_TRUE(b.Prepare(kSave, 7, {0, 1}, 4)) << "the very same";
  const auto other = b.Prepare(kSave, 7, {1, 2}, 4);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::kExists);
  // No file tells of this one: who would publish it does.
  const Node c(disk);
  ASSERT_TRUE(c.Prepare(kSave, 8, {1, 2}, 4));
  const auto news = a.commit->Look(kSave, true);
  ASSERT_FALSE(news);
  EXPECT_THAT(news.error().message, HasSubstr("its parts disagree"));
}

TEST(WorldCommitTest, AttemptsLivesAndWorldsNeverMix) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
  for (const AttemptName& other : {AttemptOf(2, 4), AttemptOf(1, 4, 900), AttemptOf(1, 3)}) {
    ASSERT_TRUE(b.Prepare(other, 7, {2, 3}, 4));
    EXPECT_EQ(b.commit->Look(other, true)->missing, (std::set<uint32_t>{0, 1}));
    EXPECT_FALSE(a.commit->Look(kSave, true)->whole);
  }
  EXPECT_EQ(StepsIn(disk), 0u);
  // One attempt, two worlds: no step of either.
  const Node c(disk);
  EXPECT_FALSE(c.Prepare(kSave, 7, {2}, 3) && c.commit->Look(kSave, true));
  EXPECT_EQ(StepsIn(disk), 0u);
}

TEST(WorldCommitTest, AFileThatIsNotWhatItsPartSaysMakesNoStep) {
  // The last one is a rank file, of another size.
  for (const std::string& bytes :
       {std::string(), std::string("something else"), RankFileOf(7, 2, 4, 9)}) {
    const auto disk = Disk();
    const Node a(disk), b(disk);
    ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
    ASSERT_TRUE(b.Prepare(kSave, 7, {2, 3}, 4));
    const PreparedPart part{kSave, 7, 4, 0, {}};
    const std::string path = "blobs/" + part.PathOf(2);
    ASSERT_TRUE(disk->Remove(path));
    if (!bytes.empty()) {
      ASSERT_TRUE(PublishText(*disk, path, bytes));
    }
    EXPECT_FALSE(a.commit->Look(kSave, true));
    EXPECT_EQ(StepsIn(disk), 0u);
    EXPECT_EQ(b.commit->Drop(kSave, 7, "what is missing")->state, State::kDropped);
  }
}

TEST(WorldCommitTest, ALifeOfAJobNeedsATextOfItsOwn) {
  const auto disk = Disk();
  const Node a(disk), b(disk), c(disk);
  ASSERT_TRUE(a.Join({0, 1}, 4));
  ASSERT_TRUE(b.Join({1, 2}, 4, 900));
  for (const bool leader : {true, false}) {
    const auto other_life = leader ? a.Join({0, 1}, 4) : b.Join({1, 2}, 4, 900);
    ASSERT_FALSE(other_life);
    EXPECT_EQ(other_life.error().code, ErrorCode::kExists);
    EXPECT_THAT(other_life.error().message, HasSubstr("rank 1 has another life on"));
  }
  b.commit->Leave("run", "job");
  ASSERT_TRUE(c.Join({2}, 3));
  for (const bool leader : {true, false}) {
    const auto other_world = leader ? a.Join({0, 1}, 4) : c.Join({2}, 3);
    ASSERT_FALSE(other_world);
    EXPECT_THAT(other_world.error().message, HasSubstr("the job has 4 ranks on"));
    EXPECT_THAT(other_world.error().message, HasSubstr("but 3 on"));
  }
}

TEST(WorldCommitTest, ADropCountsForAllOrComesTooLate) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
  EXPECT_EQ(b.commit->Drop(kSave, 7, "rank 2: full")->state, State::kDropped);
  ASSERT_TRUE(b.Prepare(kSave, 7, {2, 3}, 4));  // nothing is written any more
  const auto news = a.commit->Look(kSave, true);
  ASSERT_TRUE(news);
  EXPECT_EQ(news->state, State::kDropped);
  EXPECT_EQ(news->why, "rank 2: full");
  EXPECT_THAT(Left(*disk), testing::ElementsAre(OutcomeName(kSave)));
  ASSERT_TRUE(b.commit->FinishOthers(WorldCommit::Clock::now() + hours(1), seconds(0)));
  EXPECT_THAT(Left(*disk), testing::IsEmpty());

  const AttemptName second = AttemptOf(2, 4);
  ASSERT_TRUE(a.Prepare(second, 8, {0, 1}, 4));
  ASSERT_TRUE(b.Prepare(second, 8, {2, 3}, 4));
  ASSERT_EQ(a.commit->Look(second, true)->state, State::kDurable);
  EXPECT_EQ(b.commit->Drop(second, 8, "too late")->state, State::kDurable);
  EXPECT_TRUE(IsStepThere(disk, "8", 8, 4));
}

TEST(WorldCommitTest, WhoIsInALaterSaveIsNotWaitedFor) {
  const auto disk = Disk();
  const Node a(disk), b(disk);
  ASSERT_TRUE(b.Prepare(kSave, 7, {2, 3}, 4));
  EXPECT_TRUE(b.commit->Look(kSave, true)->passed.empty());
  ASSERT_TRUE(a.Prepare(AttemptOf(2, 4), 8, {0}, 4));
  const auto news = b.commit->Look(kSave, true);
  EXPECT_EQ(news->passed, std::set<uint32_t>{0});
  EXPECT_EQ(news->missing, (std::set<uint32_t>{0, 1}));
}

TEST(WorldCommitTest, AnyDaemonFinishesWhatOthersLeft) {
  const auto disk = Disk();
  auto a = std::make_unique<Node>(disk), b = std::make_unique<Node>(disk);
  ASSERT_TRUE(a->Prepare(kSave, 7, {0, 1}, 4));
  ASSERT_TRUE(b->Prepare(kSave, 7, {2, 3}, 4));
  ASSERT_TRUE(a->Prepare(AttemptOf(2, 4), 8, {0, 1}, 4));  // not whole
  a.reset();
  b.reset();
  const Node c(disk);
  const auto now = WorldCommit::Clock::now();
  ASSERT_TRUE(c.commit->FinishOthers(now, seconds(30)));
  EXPECT_EQ(StepsIn(disk), 0u) << "its daemons may be about to";
  const auto gone = c.commit->FinishOthers(now + seconds(31), seconds(30));
  ASSERT_TRUE(gone);
  EXPECT_TRUE(*gone);
  EXPECT_TRUE(IsStepThere(disk, "7", 7, 4));
  EXPECT_EQ(StepsIn(disk), 1u);
}

TEST(WorldCommitTest, ALaterSaveIsTheLatestWhateverTheClockSays) {
  const auto disk = Disk();
  const Node a(disk);
  ASSERT_TRUE(a.Prepare(AttemptOf(1, 1), 7, {0}, 1));
  const auto first = a.commit->Look(AttemptOf(1, 1), true);
  ASSERT_TRUE(first && first->record);
  // As if the clock had been years ahead then.
  StepRecord ahead = *first->record;
  ahead.mtime_ns += int64_t{1} << 60;
  ASSERT_TRUE(disk->Remove(StepRecordName({"run", "7", 0})));
  ASSERT_TRUE(PublishText(*disk, StepRecordName({"run", "7", 0}), RenderStepRecord(ahead)));
  const Node b(disk);
  ASSERT_TRUE(b.Prepare(AttemptOf(1, 1, 900), 7, {0}, 1));
  const auto second = b.commit->Look(AttemptOf(1, 1, 900), true);
  ASSERT_TRUE(second && second->record);
  EXPECT_EQ(second->record->id, "7-1");
  EXPECT_EQ((*Store::OpenOn(disk))->Resolve("run", "latest")->id, "7-1");
}

// A failing disk, at every call: tried again, the step is there once and whole.
TEST(WorldCommitTest, AStoreThatFailsIsTriedAgain) {
  bool went_through = false;
  for (uint64_t at = 1; !went_through; ++at) {
    ASSERT_LT(at, 1000u);
    const auto disk = Disk();
    const Node a(disk);
    ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4, kListed));
    const auto faulty = std::make_shared<FaultyStorage>(disk);
    const Node b(faulty);
    const uint64_t before = faulty->calls();
    faulty->FailAt(at);
    bool prepared = false, durable = false;
    for (int tries = 0; tries < 3 && !durable; ++tries) {
      prepared = prepared || b.Prepare(kSave, 7, {2, 3}, 4, kListed).has_value();
      const auto news = b.commit->Look(kSave, true);
      durable = prepared && news && news->state == State::kDurable;
    }
    EXPECT_TRUE(durable) << at;
    went_through = faulty->calls() < before + at;
    EXPECT_TRUE(IsStepThere(disk, "7", 7, 4, kListed)) << at;
    EXPECT_EQ(StepsIn(disk), 1u) << at;
    EXPECT_EQ(a.commit->Look(kSave, true)->state, State::kDurable) << at;
  }
}

// One machine stops at every change, with its effect and without.  The other one goes on, and so
// does the next one.
TEST(WorldCommitTest, WheneverAMachineStopsTheOthersGoOn) {
  bool went_through = false;
  for (uint64_t at = 1; !went_through; ++at) {
    ASSERT_LT(at, 100u);
    for (const bool with_effect : {false, true}) {
      const auto disk = Disk();
      const Node a(disk);
      ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4, kListed));
      const auto faulty = std::make_shared<FaultyStorage>(disk);
      {
        const Node b(faulty);
        faulty->StopAt(at, with_effect);
        const bool prepared = b.Prepare(kSave, 7, {2, 3}, 4, kListed).has_value();
        const auto news = b.commit->Look(kSave, true);
        went_through = prepared && news && news->state == State::kDurable && !faulty->stopped();
      }
      const bool published = IsStepThere(disk, "7", 7, 4, kListed);
      auto news = a.commit->Look(kSave, true);
      ASSERT_TRUE(news) << at << ": " << news.error().message;
      if (news->state == State::kWaiting) {
        EXPECT_FALSE(published) << at;
        EXPECT_EQ(news->missing, (std::set<uint32_t>{2, 3})) << at;
        news = a.commit->Drop(kSave, 7, "nothing came from ranks 2-3");
        EXPECT_EQ(news->state, State::kDropped) << at;
      }
      EXPECT_EQ(IsStepThere(disk, "7", 7, 4, kListed), news->state == State::kDurable) << at;
      const AttemptName second = AttemptOf(2, 4);
      const Node c(disk);
      ASSERT_TRUE(a.Prepare(second, 8, {0, 1}, 4));
      ASSERT_TRUE(c.Prepare(second, 8, {2, 3}, 4));
      EXPECT_EQ(c.commit->Look(second, true)->state, State::kDurable) << at;
      EXPECT_TRUE(IsStepThere(disk, "8", 8, 4)) << at;
    }
  }
}

// ---- what goes -----------------------------------------------------------------

class SweepTest : public testing::Test {
 protected:
  Node Start() const { return Node(Storage_(), directory_.path(), std::chrono::milliseconds(1)); }
  std::shared_ptr<Storage> Storage_() const {
    return std::shared_ptr<Storage>(*FileStorage::Open(directory_.path(), true));
  }
  CollectReport Collect(const Node& node) const {
    const auto report = node.store->Collect({});
    EXPECT_TRUE(report) << report.error().message;
    return *report;
  }
  size_t Directories() const { return ListBlobDirectories(directory_.path())->size(); }
  // A daemon of another kernel says something, and then nothing more.
  void SayFromElsewhere(const Digest& node, uint64_t beat, std::vector<std::string> names) const {
    const NodePresence said{beat, "far", "another kernel", 1, std::move(names)};
    const auto storage = Storage_();
    auto writer = *storage->Create(PresenceName(node));
    const std::string text = RenderPresence(said);
    ASSERT_TRUE(writer->WriteAt(0, std::as_bytes(std::span(text))));
    ASSERT_TRUE(writer->Close());
  }

  TemporaryDirectory directory_;
};

TEST_F(SweepTest, PartsOfLivingDaemonsStayThoseOfGoneOnesGo) {
  const Node observer = Start();
  auto a = std::make_unique<Node>(Start());
  ASSERT_TRUE(a->Join({0, 1}, 4));
  ASSERT_TRUE(a->Prepare(kSave, 7, {0, 1}, 4));
  EXPECT_EQ(Collect(observer).directories, 0u);
  EXPECT_EQ(Left(*Storage_()).size(), 1u);
  EXPECT_EQ(Directories(), 1u);
  a.reset();
  EXPECT_EQ(Collect(observer).directories, 1u);
  EXPECT_TRUE(Left(*Storage_()).empty());
  EXPECT_EQ(Directories(), 0u);
}

TEST_F(SweepTest, WhatIsWholeStaysForTheNextDaemon) {
  const Node observer = Start();
  for (const uint32_t rank : {0u, 2u}) {
    const Node node = Start();
    ASSERT_TRUE(node.Prepare(kSave, 7, {rank, rank + 1}, 4));
  }
  EXPECT_EQ(Collect(observer).directories, 0u);
  EXPECT_EQ(observer.commit->Look(kSave, true)->state, State::kDurable);
  EXPECT_EQ(Collect(observer).directories, 0u);
  EXPECT_TRUE(IsStepThere(Storage_(), "7", 7, 4));
}

TEST_F(SweepTest, WhatALivingDaemonWaitsForStaysWithThePartsOfGoneOnes) {
  const Node observer = Start();
  const Node a = Start();
  ASSERT_TRUE(a.Join({0, 1}, 4));
  ASSERT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4));
  {
    const Node b = Start();
    ASSERT_TRUE(b.Prepare(kSave, 7, {2}, 4));
  }
  Collect(observer);
  EXPECT_EQ(Left(*Storage_()).size(), 2u);
  ASSERT_TRUE(a.commit->Drop(kSave, 7, "nothing came from rank 3"));
  while (Collect(observer).directories == 0) {  // a may say for a while that it writes there
  }
  EXPECT_EQ(Directories(), 0u);
  EXPECT_THAT(Left(*Storage_()), testing::ElementsAre(OutcomeName(kSave)));
}

TEST_F(SweepTest, WhatAFarDaemonHasInWorkStaysUntilItIsGone) {
  const Node observer = Start();
  PreparedPart part{kSave, 7, 4, 0, {}};
  directory_.Write("blobs/" + part.PathOf(0), "half of it");
  const Digest far = RandomDigest();
  SayFromElsewhere(far, 1, {"blobs/" + part.Directory()});
  auto report = Collect(observer);
  EXPECT_EQ(report.directories, 0u);
  EXPECT_EQ(report.watched, 1u);
  SayFromElsewhere(far, 2, {"blobs/" + part.Directory()});
  report = Collect(observer);
  EXPECT_EQ(report.directories, 0u);
  EXPECT_EQ(report.watched, 0u) << "it works";
  // Nothing new for long, as this process's own clock has it.
  const NodePresence said{2, "far", "another kernel", 1, {}};
  auto now = PresenceWatch::Time::clock::now();
  PresenceState state = PresenceState::kWorks;
  for (int look = 0; state != PresenceState::kGone && look < 100; ++look) {
    now += kLongestLook;
    state = observer.store->presences().Look(directory_.path(), far, said, now);
  }
  EXPECT_EQ(Collect(observer).directories, 1u);
  EXPECT_EQ(Directories(), 0u);
}

TEST(PresenceWatchTest, OnlyTheObserversOwnTimeCountsAndNoSleepDoes) {
  PresenceWatch watch(seconds(90));
  const Digest node = RandomDigest();
  NodePresence said{1, "far", "", 0, {}};
  auto now = PresenceWatch::Time();
  EXPECT_EQ(watch.Look("", node, said, now), PresenceState::kUnknown);
  now += hours(5);  // one look counts for so much only
  EXPECT_EQ(watch.Look("", node, said, now), PresenceState::kUnknown);
  said.beat = 9;
  EXPECT_EQ(watch.Look("", node, said, now += hours(5)), PresenceState::kWorks);
  said.beat = 3;  // less, but another one
  EXPECT_EQ(watch.Look("", node, said, now += seconds(20)), PresenceState::kWorks);
  for (const int look : {20, 40, 60, 80}) {
    EXPECT_EQ(watch.Look("", node, said, now += seconds(20)), PresenceState::kWorks) << look;
  }
  EXPECT_EQ(watch.Look("", node, said, now += seconds(20)), PresenceState::kGone);
  EXPECT_EQ(watch.Look("", node, std::nullopt, now), PresenceState::kGone);
}

// ---- older builds --------------------------------------------------------------

// Gives all records the names that an older build would have given them.
void Flatten(Storage& storage) {
  for (const std::string& path : RecordsIn(storage)) {
    const CommitName name = *ParseCommitName(path);
    if (name.kind == CommitName::Kind::kWorld) continue;
    std::string flat = path.substr(std::string_view("prepared/").size());
    std::ranges::replace(flat, '/', '-');
    if (const size_t at = flat.find("part-"); at != std::string::npos) flat.erase(at, 5);
    ASSERT_TRUE(PublishText(storage, "prepared/" + flat, *ReadWhole(storage, path, 1 << 20)));
    ASSERT_TRUE(storage.Remove(path));
  }
}

// Two daemons that are gone left a save prepared, or decided and not published, by a build
// that put no manifest into the store before.
std::shared_ptr<MemoryRoot> LeftBehind(bool decided, std::optional<Digest>& manifest) {
  for (uint64_t at = 1;; ++at) {
    const auto disk = Disk();
    {
      const auto faulty = std::make_shared<FaultyStorage>(disk);
      const Node a(faulty), b(disk);
      EXPECT_TRUE(a.Prepare(kSave, 7, {0, 1}, 4) && b.Prepare(kSave, 7, {2, 3}, 4));
      if (decided) {
        faulty->StopAt(at, true);
        EXPECT_FALSE(a.commit->Look(kSave, true));
      }
    }
    const auto said = ListFilesBelow(*disk, kNodesFolder);
    for (const std::string& path : *said) EXPECT_TRUE(disk->Remove(path));
    const auto text = ReadWhole(*disk, OutcomeName(kSave), 1 << 20);
    if (decided && !text) continue;
    if (decided) {
      manifest = ParseOutcome(*text, *ParseCommitName(OutcomeName(kSave)))->manifest;
      EXPECT_TRUE(disk->Remove(ManifestName(*manifest)));
    }
    return disk;
  }
}

TEST(OlderBuildTest, WhatTheyLeftWholeBecomesAStep) {
  for (const bool decided : {false, true}) {
    std::optional<Digest> manifest;
    const auto disk = LeftBehind(decided, manifest);
    Flatten(*disk);
    const Node c(disk);
    const auto now = WorldCommit::Clock::now();
    ASSERT_TRUE(c.commit->FinishOthers(now, seconds(30)));
    ASSERT_TRUE(c.commit->FinishOthers(now + seconds(31), seconds(30)));
    EXPECT_TRUE(IsStepThere(disk, "7", 7, 4));
    if (manifest) {
      EXPECT_EQ(c.store->Resolve("run", "7")->manifest, *manifest);
    }
    for (const std::string& path : RecordsIn(*disk)) EXPECT_TRUE(ParseCommitName(path)) << path;
  }
}

TEST_F(SweepTest, WhatAnOlderBuildHasPreparedStays) {
  const Node observer = Start();
  {
    const Node old = Start();
    ASSERT_TRUE(old.Prepare(kSave, 7, {0, 1}, 4));
  }
  Flatten(*Storage_());
  EXPECT_EQ(Collect(observer).directories, 0u);
  EXPECT_EQ(Directories(), 1u);
}

// As recorded from a build before one folder per attempt.
TEST_F(SweepTest, ADaemonOfAnOlderBuildIsRefusedByName) {
  const Node leader = Start();
  const NodeRanks theirs{"run", "job", 2, "far", {{1, 101}}};
  const Digest node = RandomDigest();
  SayFromElsewhere(node, 1, {});
  ASSERT_TRUE(PublishText(*Storage_(),
                          StrCat("prepared/", DigestOf("run\njob").Hex(), "-ranks-", node.Hex()),
                          RenderNodeRanks(theirs)));
  const auto world = leader.Join({0}, 2);
  ASSERT_FALSE(world);
  EXPECT_EQ(world.error().code, ErrorCode::kExists);
  EXPECT_THAT(world.error().message, HasSubstr("the ckptfs on far is of an older build"));
}

// Such a build takes the marks for a part that it cannot read, of an attempt with an outcome: it
// reclaims nothing.  Without the outcome it would remove the part.
TEST_F(SweepTest, OlderBuildsReclaimNothingWhereThisOneWorked) {
  const Node node = Start();
  ASSERT_TRUE(node.Join({0}, 1));
  const auto [part, outcome] = LayoutMarks();
  const auto name = ParseFlatName(part), of = ParseFlatName(outcome);
  ASSERT_TRUE(name && of);
  EXPECT_EQ(name->kind, CommitName::Kind::kPart);
  EXPECT_EQ(of->kind, CommitName::Kind::kOutcome);
  EXPECT_EQ(std::pair(name->job, name->attempt), std::pair(of->job, of->attempt));
  for (const std::string& path : {part, outcome}) {
    const auto text = ReadWhole(*Storage_(), path, 1 << 20);
    ASSERT_TRUE(text) << path;
    const auto old_part = ParsePart(*text, *name);
    const auto old_outcome = ParseOutcome(*text, *of);
    ASSERT_FALSE(old_part || old_outcome);
    EXPECT_EQ(old_part.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(old_outcome.error().code, ErrorCode::kUnsupported);
  }
  EXPECT_THAT(Collect(node).notes, testing::IsEmpty());
  EXPECT_TRUE(ReadWhole(*Storage_(), part, 1 << 20)) << "nobody removes them";
}

}  // namespace
}  // namespace ckptfs
