// SPDX-License-Identifier: Apache-2.0
#include "core/store/lives.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

StepRecord Adopted(const std::string& id, uint64_t iteration, int64_t mtime_ns, uint32_t life = 0) {
  StepRecord record;
  record.run = "run";
  record.id = id;
  record.iteration = iteration;
  record.mtime_ns = mtime_ns;
  record.root = "/out";
  record.source = StrCat("/out/", id);
  record.life = life;
  return record;
}

StepRecord Step(uint64_t iteration, int64_t mtime_ns, uint32_t life = 0) {
  return Adopted(StrCat("checkpoint-", iteration), iteration, mtime_ns, life);
}

StepRecord Snapshot(const std::string& id, uint64_t iteration, int64_t mtime_ns) {
  StepRecord record = Adopted(id, iteration, mtime_ns);
  record.root = StrCat(kSnapshotRoot, "run");
  return record;
}

std::vector<std::vector<std::string>> IdsOf(const std::vector<Life>& lives) {
  std::vector<std::vector<std::string>> out;
  for (const Life& life : lives) {
    out.emplace_back();
    for (const StepRecord& step : life) out.back().push_back(step.id);
  }
  return out;
}

// Everything that was adopted is there.
SourceNow IsThere(const StepRecord&) { return SourceNow::kThere; }
SourceNow IsGone(const StepRecord&) { return SourceNow::kGone; }
SourceNow IsOther(const StepRecord&) { return SourceNow::kRewritten; }
SourceNow IsSame(const StepRecord&) { return SourceNow::kSame; }

LifeChoice Choose(const std::vector<StepRecord>& steps, const StepRecord& save,
                  SourceNow (*look)(const StepRecord&)) {
  return LifeOf(steps, NewSave{save, {}, false, 0}, look);
}

// ---- order -----------------------------------------------------------------------

TEST(LivesTest, LatestOfARunIsTheNewestStepOfItsNewestLife) {
  std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20), Adopted("checkpoint-3-1", 3, 30, 1),
                                   Adopted("checkpoint-2", 2, 25, 1)};
  const std::vector<Life> lives = SplitIntoLives(steps);
  EXPECT_THAT(IdsOf(lives), ElementsAre(ElementsAre("checkpoint-3", "checkpoint-6"),
                                        ElementsAre("checkpoint-2", "checkpoint-3-1")));
  EXPECT_EQ(std::max_element(steps.begin(), steps.end(), IsOlder)->id, "checkpoint-3-1");
}

TEST(LivesTest, SnapshotsAreOrderedByTheTimesThatTheDaemonGave) {
  // A rollback to 102: 103 and 104 are saved again, and the job dies.
  std::vector<StepRecord> steps = {Snapshot("103-1", 103, 7), Snapshot("104-1", 104, 8)};
  for (uint64_t i = 100; i <= 105; ++i) {
    steps.push_back(Snapshot(StrCat(i), i, static_cast<int64_t>(i) - 99));
  }
  const std::vector<Life> lives = SplitIntoLives(steps);
  EXPECT_THAT(IdsOf(lives), ElementsAre(ElementsAre("100", "101", "102", "103", "104", "105"),
                                        ElementsAre("103-1", "104-1")));
  EXPECT_EQ(std::max_element(steps.begin(), steps.end(), IsOlder)->id, "104-1");
  // The same step saved twice in a row does not make a life of its own.
  EXPECT_EQ(SplitIntoLives({Snapshot("1", 1, 1), Snapshot("1-1", 1, 2)}).size(), 1u);
  EXPECT_THAT(SplitIntoLives({}), IsEmpty());
}

TEST(LivesTest, TheGreatestIsTheLastOfTheLastLife) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    std::vector<StepRecord> steps;
    const bool snapshots = round % 2 == 0;
    for (unsigned i = 0; i < 1 + random() % 20; ++i) {
      StepRecord step =
          Adopted(StrCat(i), random() % 6, static_cast<int64_t>(random() % 9), random() % 3);
      if (snapshots) step = Snapshot(step.id, step.iteration, step.mtime_ns);
      step.converted = !snapshots && random() % 4 == 0;
      steps.push_back(std::move(step));
    }
    const auto latest = std::max_element(steps.begin(), steps.end(), IsOlder);
    EXPECT_EQ(SplitIntoLives(steps).back().back().id, latest->id);
    EXPECT_THAT(NewestOf(steps, 1), testing::Contains(testing::Field(&StepRecord::id, latest->id)));
  }
}

// ---- retention ---------------------------------------------------------------------

TEST(LivesTest, ThePolicyKeepsTheNewestLifeFirst) {
  const auto ids = [](const std::vector<StepRecord>& steps) {
    std::vector<std::string> out;
    for (const StepRecord& step : steps) out.push_back(step.id);
    std::sort(out.begin(), out.end());
    return out;
  };
  const std::vector<StepRecord> steps = {Step(7, 1), Step(8, 2), Step(9, 3), Step(1, 4, 1),
                                         Step(2, 5, 1)};
  EXPECT_THAT(ids(NewestOf(steps, 1)), ElementsAre("checkpoint-2"));
  EXPECT_THAT(ids(NewestOf(steps, 2)), ElementsAre("checkpoint-1", "checkpoint-2"));
  EXPECT_THAT(ids(NewestOf(steps, 3)), ElementsAre("checkpoint-1", "checkpoint-2", "checkpoint-9"));
  // Saved last by its time, though nothing proves that it begins a life.
  EXPECT_THAT(ids(NewestOf({Step(8, 2), Step(9, 3), Step(1, 4)}, 1)),
              ElementsAre("checkpoint-1", "checkpoint-9"));
}

// ---- evidence ------------------------------------------------------------------------

TEST(LivesTest, ALifeBeginsWhereTheNewestStepIsGone) {
  const std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20)};
  const LifeChoice choice = Choose(steps, Step(2, 30), IsGone);
  EXPECT_EQ(choice.begins, LifeEvidence::kGone);
  EXPECT_EQ(choice.life, 1u);
  EXPECT_EQ(choice.after->id, "checkpoint-6");
  StepRecord published = Step(2, 30);
  published.life = choice.life;
  EXPECT_THAT(DescribeChoice(published, choice), HasSubstr("run/checkpoint-6"));
  // A greater iteration goes on, also of a job that keeps few steps.
  EXPECT_EQ(Choose(steps, Step(9, 30), IsGone).begins, LifeEvidence::kNone);
  EXPECT_THAT(DescribeChoice(Step(9, 30), Choose(steps, Step(9, 30), IsGone)), IsEmpty());
}

TEST(LivesTest, ALifeBeginsWhereAPathWasSavedAgain) {
  const std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20)};
  StepRecord again = Step(3, 30);
  again.id = "checkpoint-3";
  EXPECT_EQ(Choose(steps, again, IsOther).begins, LifeEvidence::kSavedAgain);
  EXPECT_EQ(Choose(steps, again, IsOther).life, 1u);
  // Copied back with another time, it is what it was.
  EXPECT_EQ(Choose(steps, again, IsSame).life, 0u);
  EXPECT_EQ(Choose(steps, again, IsSame).begins, LifeEvidence::kNone);
  // A name that every save writes anew goes on.
  const std::vector<StepRecord> rolling = {Adopted("last", 3, 10), Adopted("last-1", 6, 20)};
  StepRecord last = Adopted("last", 9, 30);
  EXPECT_EQ(Choose(rolling, last, IsOther).begins, LifeEvidence::kNone);
}

TEST(LivesTest, ALifeBeginsWithWhatTheJobsPointerNames) {
  const std::vector<StepRecord> steps = {Step(300, 10), Step(600, 20)};
  const auto choose = [&](const StepRecord& save, NewSave::Named named) {
    return LifeOf(steps, NewSave{save, named, false, 0}, IsThere);
  };
  EXPECT_EQ(choose(Step(150, 40), {150, 40}).begins, LifeEvidence::kNamed);
  EXPECT_EQ(choose(Step(50, 30), {150, 40}).begins, LifeEvidence::kNamed);  // of the same life
  EXPECT_EQ(choose(Step(50, 30), {600, 20}).begins, LifeEvidence::kNone);   // it names the old one
  EXPECT_EQ(choose(Step(50, 15), {50, 15}).begins, LifeEvidence::kNone);    // older than 600
}

TEST(LivesTest, ALifeBeginsWithWhatCameWhileTheDirectoryWasFollowed) {
  const std::vector<StepRecord> steps = {Step(300, 10), Step(600, 20)};
  EXPECT_EQ(LifeOf(steps, NewSave{Step(50, 30), {}, true, 0}, IsThere).begins,
            LifeEvidence::kArrived);
  // The order of arrival says nothing of a copy that keeps times.
  EXPECT_EQ(LifeOf(steps, NewSave{Step(50, 5), {}, true, 0}, IsThere).begins, LifeEvidence::kNone);
  // Nor does a step of another kind: the best one, copied at the end.
  EXPECT_EQ(LifeOf(steps, NewSave{Adopted("best", 300, 30), {}, true, 0}, IsGone).begins,
            LifeEvidence::kNone);
}

StepRecord Version(uint64_t iteration, uint32_t version, int64_t mtime_ns, uint32_t life = 0) {
  const std::string mark = version == 0 ? "" : StrCat("-v", version);
  return Adopted(StrCat("epoch=0-step=", iteration, mark, ".ckpt"), iteration, mtime_ns, life);
}

TEST(LivesTest, ALifeBeginsWithAVersionOfANameThatWasThere) {
  const std::vector<StepRecord> steps = {Version(3, 0, 10), Version(9, 0, 20)};
  const auto choose = [](const std::vector<StepRecord>& known, const StepRecord& save,
                         uint32_t version) {
    return LifeOf(known, NewSave{save, {}, false, 0, version}, IsThere);
  };
  EXPECT_EQ(choose(steps, Version(3, 1, 30), 1).begins, LifeEvidence::kVersion);
  EXPECT_EQ(choose(steps, Version(3, 1, 15), 1).begins, LifeEvidence::kNone);  // two callbacks
  EXPECT_EQ(choose(steps, Version(9, 1, 30), 1).begins, LifeEvidence::kNone);  // latest by its time
  EXPECT_EQ(choose(steps, Version(3, 1, 30), 0).begins, LifeEvidence::kNone);  // no such name
  const auto second = {Version(3, 0, 10), Version(9, 0, 20), Version(3, 1, 30, 1)};
  EXPECT_EQ(choose(second, Version(6, 1, 40), 1).begins, LifeEvidence::kNone);
  EXPECT_EQ(choose(second, Version(6, 1, 40), 1).life, 1u);
}

TEST(LivesTest, VersionsComeLastIfTheyWereSavedLast) {
  const auto order = [](std::vector<FoundSave> saves) { return OrderOfSaves(saves); };
  const auto save = [](uint64_t iteration, int64_t time, uint32_t version) {
    return FoundSave{"/a", iteration, time, false, false, version};
  };
  EXPECT_THAT(
      order({save(3, 10, 0), save(3, 40, 1), save(6, 20, 0), save(6, 50, 1), save(9, 30, 0)}),
      ElementsAre(0, 2, 4, 1, 3));
  EXPECT_THAT(order({save(3, 10, 0), save(3, 40, 1), save(3, 60, 2), save(6, 20, 0), save(6, 50, 1),
                     save(9, 30, 0)}),
              ElementsAre(0, 3, 5, 1, 4, 2));
  // The second run passed the first, and a third did not.
  EXPECT_THAT(
      order({save(3, 10, 0), save(3, 40, 1), save(6, 20, 0), save(6, 50, 1), save(9, 60, 0)}),
      ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(
      order({save(3, 10, 0), save(3, 40, 1), save(3, 70, 2), save(6, 20, 0), save(9, 60, 0)}),
      ElementsAre(0, 1, 3, 4, 2));
}

TEST(LivesTest, AFinishedRunThatIsAdoptedInAnyOrderIsOfOneLife) {
  std::mt19937 random(5);
  for (int round = 0; round < 100; ++round) {
    std::vector<StepRecord> saves;
    for (uint64_t i = 1; i <= 8; ++i) saves.push_back(Step(100 * i, static_cast<int64_t>(10 * i)));
    if (round % 2 == 1) {  // copied without their times
      for (StepRecord& save : saves) save.mtime_ns = static_cast<int64_t>(1000 + random() % 100);
    }
    std::shuffle(saves.begin(), saves.end(), random);
    std::vector<StepRecord> steps;
    for (StepRecord save : saves) {
      // Adopted sources may be gone by then; those of copies without times must be there.
      const LifeChoice choice = Choose(steps, save, round % 2 == 1 ? IsThere : IsGone);
      EXPECT_EQ(choice.begins, LifeEvidence::kNone);
      save.life = choice.life;
      steps.push_back(save);
    }
    EXPECT_EQ(SplitIntoLives(steps).size(), 1u);
    EXPECT_EQ(SplitIntoLives(steps).back().back().id, "checkpoint-800");
  }
}

TEST(LivesTest, ATimeAloneProvesNothingAndIsTold) {
  const std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20)};
  const LifeChoice choice = Choose(steps, Step(2, 30), IsThere);
  EXPECT_EQ(choice.begins, LifeEvidence::kNone);
  EXPECT_EQ(choice.life, 0u);
  EXPECT_THAT(DescribeChoice(Step(2, 30), choice), HasSubstr("ckptfs remove run/checkpoint-6"));
}

// A directory with steps of two trainings that is adopted for the first time: by iteration.
TEST(LivesTest, AGreaterIterationOfAnEarlierTimeIsToldToo) {
  const std::vector<StepRecord> steps = {Step(1, 30), Step(2, 40), Step(3, 10)};
  const LifeChoice choice = Choose(steps, Step(4, 20), IsThere);
  EXPECT_EQ(choice.life, 0u);
  EXPECT_THAT(DescribeChoice(Step(4, 20), choice),
              HasSubstr("run/checkpoint-2 has a later time than run/checkpoint-4"));
  // One that lies between tells nothing new.
  EXPECT_FALSE(Choose(steps, Step(2, 35), IsThere).doubt);
}

TEST(LivesTest, ASaveOfAnotherLifeThanTheFirstLeavesNoDoubt) {
  const std::vector<StepRecord> steps = {Step(10, 10), Step(20, 20), Step(10, 30, 1)};
  const LifeChoice choice = Choose(steps, Step(20, 40), IsThere);
  EXPECT_EQ(choice.life, 1u);
  EXPECT_FALSE(choice.doubt);
}

TEST(LivesTest, WhatIsAdoptedLaterIsOfTheLifeInWhichItWasSaved) {
  const std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20),
                                         Adopted("checkpoint-3-1", 3, 30, 1)};
  EXPECT_EQ(Choose(steps, Step(5, 15), IsThere).life, 0u);
  EXPECT_EQ(Choose(steps, Step(9, 25), IsThere).life, 0u);  // it does not become the latest
  EXPECT_EQ(Choose(steps, Step(4, 40), IsThere).life, 1u);
  EXPECT_EQ(Choose(steps, Step(1, 5), IsThere).life, 0u);  // before all there is
  EXPECT_EQ(Choose({}, Step(1, 5), IsThere).life, 0u);
  // Another life in the same run.
  const LifeChoice third = Choose(steps, Step(2, 50), IsGone);
  EXPECT_EQ(third.life, 2u);
  EXPECT_EQ(third.after->id, "checkpoint-3-1");
}

TEST(LivesTest, AConversionIsOfTheLifeOfItsOriginal) {
  const std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20),
                                         Adopted("checkpoint-3-1", 3, 30, 1)};
  StepRecord converted = Adopted("checkpoint-6_universal", 6, 90);
  converted.converted = true;
  EXPECT_EQ(Choose(steps, converted, IsGone).life, 0u);
  converted.iteration = 3;
  EXPECT_EQ(Choose(steps, converted, IsGone).life, 1u);
  EXPECT_EQ(Choose(steps, converted, IsGone).begins, LifeEvidence::kNone);
}

TEST(LivesTest, AStepOfWhichSomeFilesWereWrittenLaterIsNoOtherSave) {
  const std::vector<StepRecord> steps = {Step(3, 10), Step(6, 20)};
  StepRecord converted = Step(3, 30);
  const auto choose = [&](int64_t oldest_ns) {
    return LifeOf(steps, NewSave{converted, {}, false, oldest_ns}, IsOther).begins;
  };
  EXPECT_EQ(choose(25), LifeEvidence::kSavedAgain);
  EXPECT_EQ(choose(10), LifeEvidence::kNone);
}

// ---- steps that are found together ---------------------------------------------------

TEST(LivesTest, WhatThePointerNamesComesLastIfItWasSavedLast) {
  const auto order = [](std::vector<FoundSave> saves) { return OrderOfSaves(saves); };
  EXPECT_THAT(order({{"/a", 300, 3, false, false}, {"/a", 100, 1, false, false}}),
              ElementsAre(1, 0));
  // 100 and 200 of a training; 50 and 150 of the one that began again.
  EXPECT_THAT(order({{"/a", 50, 30, false, false},
                     {"/a", 100, 10, false, false},
                     {"/a", 150, 40, false, true},
                     {"/a", 200, 20, false, false}}),
              ElementsAre(1, 3, 0, 2));
  // A save that came after the pointer; a pointer that somebody set back.
  EXPECT_THAT(order({{"/a", 150, 15, false, true}, {"/a", 200, 20, false, false}}),
              ElementsAre(0, 1));
  // Another directory's.
  EXPECT_THAT(order({{"/a", 150, 40, false, true}, {"/b", 200, 20, false, false}}),
              ElementsAre(0, 1));
}

}  // namespace
}  // namespace ckptfs
