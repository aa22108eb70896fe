// SPDX-License-Identifier: Apache-2.0

#include "core/follow/follow.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tests/core/adopt/followed.h"

namespace ckptfs {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(FollowTest, AStepIsTakenOnceNobodyWritesItAnyMore) {
  EXPECT_THAT(Look(), IsEmpty());  // the directory is not there yet
  EXPECT_THAT(seen_.said, IsEmpty());
  EXPECT_THAT(follower_->idle().why,
              HasSubstr("waits for the first step: the directory is not there yet"));
  WriteStep(1);
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(follower_->idle().why, HasSubstr("waits for the first step: step1: the step is "
                                               "being written"));
  EXPECT_EQ(seen_.next, now_ + options_.quiet);
  EXPECT_THAT(Look(std::chrono::milliseconds(999)), IsEmpty());
  Write(1, "more", "of it");
  EXPECT_THAT(Look(std::chrono::milliseconds(1)), IsEmpty());
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  EXPECT_THAT(Look(seconds(100)), IsEmpty());
  EXPECT_EQ(store_->Steps("run7")->size(), 1u);
  EXPECT_THAT(follower_->waiting(), IsEmpty());
  EXPECT_EQ(follower_->idle().why, "");
}

TEST_F(FollowTest, WhatLiesThereAndIsNoStepIsTold) {
  options_.adopt.hints.recognise = [](const Root&, const std::string& path) {
    const bool alien = LastComponent(path) == "alien";
    return Result<std::optional<Recognised>>(
        alien ? std::optional(Recognised{"alien: not readable yet", {}}) : std::nullopt);
  };
  MakeFollower();
  std::filesystem::create_directory(directory_.path() + "/run7");
  Look();
  EXPECT_THAT(follower_->idle().why,
              HasSubstr("the directory is empty; looked for the formats fake"));
  directory_.Write("run7/train.log", "x");
  Look();
  EXPECT_THAT(follower_->idle().why, HasSubstr("it holds 1 file (train.log)"));
  EXPECT_FALSE(follower_->idle().unread);
  directory_.Write("run7/alien/x", "x");
  Look();
  EXPECT_TRUE(follower_->idle().unread);
  EXPECT_THAT(follower_->idle().why,
              HasSubstr("run7/alien: alien: not readable yet; nothing of it is adopted"));
}

TEST_F(FollowTest, WhyAnOptimizerIsNotTakenIsSaidOnce) {
  for (int n = 1; n < 3; ++n) {
    WriteStep(n);
    Write(n, "left_out", "nobody knows whose");
    Look();
    ASSERT_THAT(Look(seconds(1)), ElementsAre("step" + std::to_string(n)));
    const std::vector<std::string> first = {
        "run7/step1: left out: the optimizer: nobody knows whose; give more"};
    EXPECT_EQ(seen_.said, n == 1 ? first : std::vector<std::string>());
  }
}

TEST_F(FollowTest, WhatNothingSealsIsWaitedForLonger) {
  WriteStep(1, "");
  WriteStep(2, "unsealed");
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(seconds(9)), IsEmpty());
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  EXPECT_THAT(Look(seconds(109)), IsEmpty());
  ASSERT_EQ(follower_->waiting().size(), 1u);
  EXPECT_EQ(follower_->waiting()[0].why, "the file that its save writes last is missing");
  EXPECT_FALSE(follower_->waiting()[0].left_behind);
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step2"));
}

// A log beside a step that is whole grows for hours, and is newer than what was written last.
TEST_F(FollowTest, AFileThatOnlyBecomesLongerKeepsNoStepBack) {
  for (const std::string last : {"sealed", "newest"}) {
    const int number = last == "sealed" ? 1 : 2;
    const std::string id = "step" + std::to_string(number);
    WriteStep(number, last);
    std::string log = "0";
    const auto grow = [&] { Write(number, "train.log", log += " and on"); };
    const auto tick = [] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
    };  // of the kernel's clock
    const auto expect_in_ten_seconds = [&] {
      tick();
      grow();
      for (int second = 0; second < 10; ++second) {
        EXPECT_THAT(Look(seconds(1)), IsEmpty()) << second;
        grow();
      }
      EXPECT_THAT(Look(seconds(1)), ElementsAre(id)) << last;
    };
    expect_in_ten_seconds();
    for (int second = 0; second < 30; ++second) {
      grow();
      EXPECT_THAT(Look(seconds(1)), IsEmpty()) << "it is the same step";
    }
    EXPECT_EQ(store_->Steps("run7")->size(), size_t(number));
    // It is saved again: what is read changes.
    tick();
    Write(number, "data", std::string(4000, 'z'));
    Write(number, last, "again");
    expect_in_ten_seconds();
  }
}

// Somebody looked between its creation and its bytes, and between two writes of these.
TEST_F(FollowTest, WhatIsWrittenLastIsNoLogThoughItWasEmptyOrHalf) {
  int number = 0;
  for (const std::string last : {"sealed", "newest"}) {
    for (const std::vector<std::string>& writes : {std::vector<std::string>{"{}"}, {"{", "{}"}}) {
      const std::string id = "step" + std::to_string(++number);
      WriteStep(number, last);
      for (const std::string& text : writes) {
        EXPECT_THAT(Look(std::chrono::milliseconds(900)), IsEmpty());
        Write(number, last, text);
      }
      EXPECT_THAT(Look(std::chrono::milliseconds(900)), IsEmpty());
      EXPECT_THAT(Look(std::chrono::milliseconds(900)), IsEmpty());
      EXPECT_THAT(Look(std::chrono::milliseconds(100)), ElementsAre(id)) << last;
    }
  }
}

// Files that rsync and tools that save leave half-way; the files beside them may be whole.
TEST_F(FollowTest, WhatIsSavedOrCopiedIsNoLog) {
  int number = 0;
  for (const std::string file :
       {"tag/.states.pt.a8Xz1Q", "custom_checkpoint_0.pkl", "tag/model.safetensors"}) {
    const std::string id = "step" + std::to_string(++number);
    WriteStep(number, "sealed");
    std::string bytes = "0";
    for (int second = 0; second < 40; ++second) {
      Write(number, file, bytes += " and on");
      EXPECT_THAT(Look(seconds(1)), IsEmpty()) << file << " " << second;
    }
    EXPECT_THAT(Look(), IsEmpty()) << file;
    EXPECT_THAT(Look(seconds(1)), ElementsAre(id)) << file;
  }
}

// A step that is written again under its name has the last file of the save before.
TEST_F(FollowTest, ASaveOverAStepIsWaitedForUntilItsOwnLastFile) {
  WriteStep(1, "sealed");
  Write(1, "weights.pt", "first");
  Look();
  ASSERT_THAT(Look(seconds(1)), ElementsAre("step1"));
  const auto again = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // a tick of the kernel's clock
    Write(1, "weights.pt", "second");
    for (int second = 0; second < 300; ++second) {
      EXPECT_THAT(Look(seconds(1)), IsEmpty()) << second;
    }
    ASSERT_THAT(follower_->waiting(), testing::SizeIs(1));
    EXPECT_THAT(follower_->waiting()[0].why,
                HasSubstr("is being rewritten: sealed, which is written last"));
    Write(1, "data", std::string(4000, 'z'));
    Write(1, "sealed", "again");
    Look();
    EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  };
  again();
  // Other files beside it are not a save.
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  Write(1, "uploaded.flag", "");
  Look();
  Look(seconds(1));
  EXPECT_THAT(follower_->waiting(), IsEmpty());
  again();
}

// Clocks differ, and what is copied keeps its times.
TEST_F(FollowTest, AnOlderAttemptInItsPlaceIsAnotherOne) {
  WriteStep(1, "sealed");
  Look();
  ASSERT_THAT(Look(seconds(1)), ElementsAre("step1"));
  RemoveStep(1);
  WriteStep(1, "sealed");
  Write(1, "data", std::string(4000, 'z'));
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(directory_.path() + "/run7")) {
    std::filesystem::last_write_time(
        entry.path(), std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  }
  Look();
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
}

TEST_F(FollowTest, TheStepBeforeIsToldThoughItIsGone) {
  WriteStep(1, "");
  Write(1, "custom.pkl", "a");
  Look();
  EXPECT_THAT(fake_->before(), IsEmpty());
  Look(seconds(2));
  RemoveStep(1);  // by its tool, before it could be taken
  WriteStep(2, "");
  Look();
  EXPECT_THAT(fake_->before(), IsEmpty());  // it was gone after that
  Look(seconds(2));
  EXPECT_THAT(fake_->before(), testing::Contains(testing::EndsWith("step1/custom.pkl")));
  ASSERT_THAT(Look(seconds(8)), ElementsAre("step2"));
  WriteStep(3, "");
  Look();
  EXPECT_THAT(fake_->before(), testing::Contains(testing::EndsWith("step2/data")));
}

TEST_F(FollowTest, ADirectoryThatIsRenamedWhenItIsWholeIsAStepThen) {
  WriteStep(1, "sealed");
  const std::string run = directory_.path() + "/run7/";
  for (const char* name : {"tmp-step1", ".step1", "step1.tmp"}) {
    std::filesystem::rename(run + "step1", run + name);
    Look();
    EXPECT_THAT(Look(seconds(200)), IsEmpty()) << name;
    std::filesystem::rename(run + name, run + "step1");
  }
  Look();
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
}

TEST_F(FollowTest, WhatIsReadIsNoLog) {
  WriteStep(1);
  std::string data(4000, 'a');
  const auto grow = [&] { Write(1, "data", data += 'b'); };
  for (int second = 0; second < 40; ++second) {
    EXPECT_THAT(Look(seconds(1)), IsEmpty()) << second;
    grow();
  }
  EXPECT_THAT(seen_.said, IsEmpty());
  ASSERT_THAT(follower_->waiting(), testing::SizeIs(1));
  EXPECT_THAT(follower_->waiting()[0].why, HasSubstr("is being written"));
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(seconds(20)), ElementsAre("step1"));
}

TEST_F(FollowTest, WhatIsWrittenAnewBesideALogIsWaitedFor) {
  for (const char* last : {"sealed", ""}) {  // and what nothing seals
    RemoveStep(1);
    WriteStep(1, last);
    std::string log = "0";
    for (int second = 0; second < 40; ++second) {
      EXPECT_THAT(Look(seconds(1)), IsEmpty()) << second;
      Write(1, "train.log", log += " and on");
      if (*last != 0) Write(1, "data", std::string(4000, static_cast<char>('a' + second % 3)));
    }
  }
}

TEST_F(FollowTest, WhatLayThereLongBeforeWaitsForNobody) {
  WriteStep(1, "unsealed");
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(directory_.path() + "/run7")) {
    std::filesystem::last_write_time(entry.path(),
                                     std::filesystem::file_time_type::clock::now() - seconds(90));
  }
  WriteStep(2, "");
  EXPECT_THAT(Look(), ElementsAre("step1"));
}

TEST_F(FollowTest, ASaveThatDiedIsNamedAndNeverAStep) {
  Write(1, "data", "half");
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_THAT(Look(seconds(10)), IsEmpty());
  EXPECT_THAT(seen_.said, IsEmpty());  // it may be in work
  EXPECT_THAT(follower_->waiting()[0].why, HasSubstr("step1: no file done"));
  WriteStep(2);
  Look();
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step2"));
  EXPECT_THAT(seen_.said, ElementsAre(HasSubstr("step1 was left behind unfinished: ")));
  EXPECT_TRUE(follower_->waiting()[0].left_behind);
  Look(seconds(1));
  EXPECT_THAT(seen_.said, IsEmpty());
  WriteStep(1);  // somebody wrote it after all
  Look();
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  EXPECT_THAT(follower_->waiting(), IsEmpty());
}

// "3step" is one that was begun; FakeSource has those of the other spelling.
Result<std::optional<Recognised>> Begun(const Root&, const std::string& path) {
  const std::string name = LastComponent(path);
  if (!name.ends_with("step")) return std::optional<Recognised>();
  return std::optional(Recognised{"no weights yet", std::stoull(name)});
}

TEST_F(FollowTest, AStepThatWasBegunIsWaitedForAndWhatIsBeingDeletedIsNot) {
  options_.adopt.hints.recognise = Begun;
  MakeFollower();
  WriteStep(1);
  Look();
  ASSERT_THAT(Look(seconds(1)), ElementsAre("step1"));
  EXPECT_THAT(follower_->waiting(), IsEmpty());
  directory_.Write("run7/1step/rest", "");  // of a step that went, by its number
  directory_.Write("run7/3step/config.json", "");
  Look(seconds(1));
  ASSERT_EQ(follower_->waiting().size(), 1u);
  EXPECT_EQ(follower_->waiting()[0].id, "3step");
  EXPECT_EQ(follower_->waiting()[0].why, "no weights yet");
  EXPECT_FALSE(follower_->waiting()[0].left_behind);
  std::filesystem::remove_all(directory_.path() + "/run7/1step");
  Look(seconds(1));
  EXPECT_THAT(seen_.said, IsEmpty());
  WriteStep(4);
  Look(seconds(10));
  ASSERT_THAT(Look(seconds(1)), ElementsAre("step4"));
  EXPECT_THAT(seen_.said, ElementsAre("3step was left behind unfinished: no weights yet"));
  EXPECT_TRUE(follower_->waiting()[0].left_behind);
}

TEST_F(FollowTest, RetentionTakesNoStepOfTheStore) {
  options_.adopt.ownership = Ownership::kLink;
  MakeFollower();
  for (int n = 1; n < 8; ++n) {
    WriteStep(n);
    if (n > 2) RemoveStep(n - 2);
    Look(seconds(4));
    ASSERT_THAT(Look(seconds(1)), ElementsAre("step" + std::to_string(n)));
    EXPECT_THAT(seen_.said, IsEmpty());
  }
  EXPECT_EQ(store_->Steps("run7")->size(), 7u);
  std::filesystem::rename(directory_.path() + "/run7", directory_.path() + "/away");
  EXPECT_THAT(Look(seconds(5)), IsEmpty());
  EXPECT_THAT(seen_.said, IsEmpty());
  std::filesystem::rename(directory_.path() + "/away", directory_.path() + "/run7");
  EXPECT_THAT(Look(seconds(5)), IsEmpty());  // they are known
  EXPECT_EQ(store_->Steps("run7")->size(), 7u);
}

TEST_F(FollowTest, AStepThatIsBeingDeletedIsNotAnotherOne) {
  options_.adopt.ownership = Ownership::kLink;
  MakeFollower();
  Write(1, "aside", "what no plan reads");
  WriteStep(1);
  Look();
  ASSERT_THAT(Look(seconds(1)), ElementsAre("step1"));
  for (const std::string name : {"aside", "sealed", "data"}) {
    std::filesystem::remove(directory_.path() + "/run7/step1/" + name);
    EXPECT_THAT(Look(seconds(200)), IsEmpty());
    EXPECT_THAT(Look(seconds(200)), IsEmpty());
    EXPECT_THAT(seen_.said, IsEmpty());
  }
  RemoveStep(1);
  Look();
  EXPECT_THAT(seen_.said, IsEmpty());
  EXPECT_EQ(store_->Steps("run7")->size(), 1u);
}

TEST_F(FollowTest, AMarkerMakesNoOtherStep) {
  for (const Ownership ownership : {Ownership::kReference, Ownership::kLink, Ownership::kCopy}) {
    options_.adopt.ownership = ownership;
    options_.adopt.run = "run" + std::to_string(static_cast<int>(ownership));
    MakeFollower();
    WriteStep(1);
    Look();
    ASSERT_THAT(Look(seconds(1)), ElementsAre("step1"));
    Write(1, "uploaded", options_.adopt.run);
    Look();
    Look(seconds(200));
    EXPECT_EQ(store_->Steps(options_.adopt.run)->size(), 1u);
    EXPECT_THAT(seen_.said, IsEmpty());
  }
}

TEST_F(FollowTest, AStepThatGoesUnfinishedIsSaid) {
  Write(1, "data", "half");
  Look();
  RemoveStep(1);
  Look(seconds(1));
  EXPECT_THAT(seen_.said, ElementsAre("step1 disappeared before it could be adopted: the step is "
                                      "being written"));
  EXPECT_THAT(follower_->waiting(), IsEmpty());
}

TEST_F(FollowTest, WhatIsWrittenAgainIsAnotherAttempt) {
  for (const Ownership ownership : {Ownership::kReference, Ownership::kCopy}) {
    options_.adopt.ownership = ownership;
    options_.adopt.run = ownership == Ownership::kCopy ? "copied" : "referred";
    MakeFollower();
    WriteStep(1);
    Look();
    ASSERT_THAT(Look(seconds(1)), ElementsAre("step1"));
    Write(1, "data", std::string(4000, 'z'));
    Look(seconds(30));
    const bool owned = ownership == Ownership::kCopy;  // of which the first is whole still
    EXPECT_THAT(Look(seconds(1)), ElementsAre(owned ? "step1-1" : "step1"));
  }
}

TEST_F(FollowTest, ATrainingThatBeginsAgainIsFollowed) {
  options_.adopt.run = "run";
  MakeFollower();
  for (const bool removed : {true, false}) {  // its steps, before it begins again
    WriteStep(5);
    WriteStep(8);
    Look();
    ASSERT_THAT(Look(seconds(11)), ElementsAre("step5", "step8"));
    if (removed) RemoveStep(5);
    if (removed) RemoveStep(8);
    Look(seconds(30));
    WriteStep(2);
    Look(seconds(1));
    ASSERT_THAT(Look(seconds(1)), ElementsAre("step2"));
    EXPECT_EQ(store_->Resolve(options_.adopt.run, "latest")->id, "step2");
    EXPECT_THAT(seen_.said, testing::Contains(HasSubstr("begins another life")));
    WriteStep(3);
    Look(seconds(1));
    ASSERT_THAT(Look(seconds(1)), ElementsAre("step3"));
    EXPECT_EQ(store_->Resolve(options_.adopt.run, "latest")->id, "step3");
    for (const int step : {2, 3, 5, 8}) RemoveStep(step);
    options_.adopt.run = "run-b";
    MakeFollower();
  }
}

// Two trainings lie there, and the job's pointer names a step of the later one.
TEST_F(FollowTest, WhatThePointerNamesIsTheLatestOfTheFirstLookToo) {
  WriteStep(2);
  WriteStep(6);
  WriteStep(3);
  WriteStep(4);
  Write(4, "latest", "");
  Look();
  ASSERT_THAT(Look(seconds(11)), ElementsAre("step2", "step6", "step3", "step4"));
  EXPECT_EQ(store_->Resolve("run7", "latest")->id, "step4");
}

TEST_F(FollowTest, AStepOfTheLifeBeforeThatIsNotWholeIsLeftBehind) {
  WriteStep(5);
  WriteStep(8);
  Write(9, "data", "half");
  Look();
  ASSERT_THAT(Look(seconds(11)), ElementsAre("step5", "step8"));
  ASSERT_EQ(follower_->waiting().size(), 1u);
  EXPECT_FALSE(follower_->waiting()[0].left_behind);
  WriteStep(2);
  Look(seconds(1));
  ASSERT_THAT(Look(seconds(11)), ElementsAre("step2"));
  ASSERT_EQ(follower_->waiting().size(), 1u);
  EXPECT_TRUE(follower_->waiting()[0].left_behind);
}

TEST_F(FollowTest, LinksThatLeadInCirclesAreNotFollowed) {
  WriteStep(1);
  const std::string step = directory_.path() + "/run7/step1";
  for (const std::string name : {"a", "b", "c"}) {
    std::filesystem::create_directory_symlink(step, step + "/" + name);
  }
  Write(1, "deeper/file", "x");
  EXPECT_THAT(Look(), IsEmpty());
  Write(1, "deeper/file", "");
  EXPECT_THAT(Look(seconds(1)), IsEmpty());  // it is of the step, too
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
}

TEST_F(FollowTest, WhatMayPassIsTriedAgain) {
  WriteStep(1);
  Look();
  fake_->FailAt(3, ErrorCode::kExhausted);  // after Find and Complete
  EXPECT_THAT(Look(seconds(1)), IsEmpty());
  EXPECT_THAT(seen_.said, ElementsAre(HasSubstr("not adopted: step1: ")));
  EXPECT_EQ(seen_.next, now_ + options_.retry);
  EXPECT_THAT(Look(seconds(9)), IsEmpty());
  EXPECT_THAT(seen_.said, IsEmpty());
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
}

TEST_F(FollowTest, WhatIsNotSupportedIsSaidOnce) {
  WriteStep(1);
  Look();
  fake_->FailAt(3, ErrorCode::kUnsupported);
  EXPECT_THAT(Look(seconds(1)), IsEmpty());
  EXPECT_EQ(seen_.said.size(), 1u);
  EXPECT_THAT(Look(seconds(100)), IsEmpty());
  EXPECT_THAT(seen_.said, IsEmpty());
  ASSERT_EQ(follower_->waiting().size(), 1u);
  EXPECT_TRUE(follower_->waiting()[0].refused);
  EXPECT_THAT(follower_->idle().why, HasSubstr("nothing is adopted yet: step1: "));
  WriteStep(2);
  Look();
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step2"));
  Look(seconds(100));
  EXPECT_FALSE(follower_->waiting()[0].left_behind);  // it is whole
  EXPECT_THAT(seen_.said, IsEmpty());
  Write(1, "data", std::string(4000, 'z'));
  Look();
  EXPECT_FALSE(follower_->waiting()[0].refused);  // as it is now
}

TEST_F(FollowTest, AListingThatFailsIsNoNewsOfSteps) {
  Write(1, "data", "half");
  Look();
  fake_->FailAt(1, ErrorCode::kNotFound);  // a step went while it was listed
  Look(seconds(1));
  EXPECT_THAT(seen_.said, IsEmpty());
  EXPECT_EQ(seen_.next, now_ + options_.quiet);
  fake_->FailAt(1, ErrorCode::kIo);
  Look(seconds(1));
  EXPECT_EQ(seen_.said.size(), 1u);
  fake_->FailAt(1, ErrorCode::kIo);
  Look(seconds(1));
  EXPECT_THAT(seen_.said, IsEmpty());
  EXPECT_EQ(follower_->waiting().size(), 1u);
}

TEST_F(FollowTest, TakingIsNoReasonToLookAway) {
  WriteStep(1);
  Look();
  const std::chrono::milliseconds delay(100);
  fake_->SetDelay(delay);  // of Find, which counts, and of Complete and Read, which do not
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  EXPECT_GE(seen_.earliest, now_ + 10 * delay);
  EXPECT_LT(seen_.earliest, now_ + 10 * 3 * delay);
}

TEST_F(FollowTest, LookingIsPacedByWhatItTakes) {
  WriteStep(1);
  fake_->SetDelay(std::chrono::milliseconds(30));
  Look();
  EXPECT_GE(seen_.earliest, now_ + std::chrono::milliseconds(300));
}

}  // namespace
}  // namespace ckptfs
