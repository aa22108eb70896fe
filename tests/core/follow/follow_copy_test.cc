// SPDX-License-Identifier: Apache-2.0
//
// Steps that are copied into a directory that is followed.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "core/base/descriptor.h"
#include "core/io/local_filesystem.h"
#include "tests/core/adopt/followed.h"

namespace ckptfs {
namespace {

using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using FollowCopyTest = FollowTest;

// Programs that copy give a file its size before its bytes, and may stall for longer than anybody
// waits.
TEST_F(FollowCopyTest, WhatWasNeverWrittenIsNoStepUntilItIs) {
  if (!IsLocalFilesystem(directory_.path())) GTEST_SKIP() << "the filesystem may tell nothing";
  int number = 0;
  for (const bool allocate : {false, true}) {
    const std::string id = "step" + std::to_string(++number);
    WriteStep(number, "");
    const std::string path = directory_.path() + "/run7/" + id + "/data";
    Descriptor copy = *OpenDescriptor(path, O_WRONLY | O_TRUNC);
    ASSERT_EQ(allocate ? posix_fallocate(copy.get(), 0, 8192) : ftruncate(copy.get(), 8192), 0);
    EXPECT_THAT(Look(), IsEmpty());
    for (int second = 0; second < 70; ++second) EXPECT_THAT(Look(seconds(1)), IsEmpty()) << second;
    EXPECT_THAT(follower_->waiting().front().why,
                HasSubstr("/data: a process has it open for writing"));
    copy = Descriptor();  // it died
    Look(seconds(1));
    for (int minute = 0; minute < 70; ++minute) EXPECT_THAT(Look(seconds(60)), IsEmpty()) << minute;
    EXPECT_THAT(follower_->waiting().front().why,
                HasSubstr("/data: 8192 of its 8192 bytes were never written"));
    EXPECT_THAT(follower_->waiting().front().why,
                HasSubstr("`ckptfs adopt` takes the step as it is"));
    Write(number, "data", std::string(8192, 'x'));
    EXPECT_THAT(Look(), IsEmpty());
    EXPECT_THAT(Look(seconds(10)), ElementsAre(id));
  }
}

// The tool's last file says that its zeros are meant.
TEST_F(FollowCopyTest, HolesOfASealedStepAreItsZeros) {
  WriteStep(1, "sealed");
  std::filesystem::resize_file(directory_.path() + "/run7/step1/data", 0);
  std::filesystem::resize_file(directory_.path() + "/run7/step1/data", 8192);
  Look();
  EXPECT_THAT(Look(seconds(9)), IsEmpty());
  EXPECT_THAT(seen_.said, IsEmpty());
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  EXPECT_FALSE(seen_.adopted[0].provisional);
}

// rclone and the hub's downloads; a part that is left over keeps no step back for good.
TEST_F(FollowCopyTest, APartOfAFileIsWaitedFor) {
  WriteStep(1, "sealed");
  Write(1, "weights.pt.tmp", "half");
  Look();
  EXPECT_THAT(Look(seconds(119)), IsEmpty());
  EXPECT_THAT(follower_->waiting().front().why, HasSubstr("weights.pt.tmp: a copy is writing this "
                                                          "partial file"));
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
  WriteStep(2, "sealed");
  Write(2, "weights.pt.tmp", "half");
  Look();
  const std::string path = directory_.path() + "/run7/step2/weights.pt";
  std::filesystem::rename(path + ".tmp", path);
  Look(seconds(60));
  EXPECT_THAT(Look(seconds(1)), ElementsAre("step2"));
}

TEST_F(FollowCopyTest, AProvisionalStepThatItsToolDeletesWasWhole) {
  options_.adopt.ownership = Ownership::kLink;
  MakeFollower();
  WriteStep(1, "");
  Look();
  ASSERT_THAT(Look(seconds(10)), ElementsAre("step1"));
  RemoveStep(1);
  Look(seconds(1));
  ASSERT_EQ(store_->Steps("run7")->size(), 1u);
  EXPECT_FALSE(store_->Steps("run7")->at(0).provisional);
}

// A copy that goes on after a pause has changed what is shown.
TEST_F(FollowCopyTest, AStepThatNothingSealsIsProvisional) {
  for (const Ownership ownership : {Ownership::kReference, Ownership::kLink, Ownership::kCopy}) {
    options_.adopt.ownership = ownership;
    options_.adopt.run = "run" + std::to_string(static_cast<int>(ownership));
    MakeFollower();
    const auto shown = [&] {  // a run without a step is not one
      return store_->Steps(options_.adopt.run).value_or(std::vector<StepRecord>());
    };
    RemoveStep(1);
    WriteStep(1, "");
    Look();
    ASSERT_THAT(Look(seconds(10)), ElementsAre("step1"));
    EXPECT_TRUE(shown().at(0).provisional);
    Write(1, "optimizer.pt", "it goes on");
    EXPECT_THAT(Look(seconds(20)), IsEmpty());
    EXPECT_THAT(shown(), IsEmpty());
    EXPECT_THAT(seen_.said, ElementsAre(HasSubstr("step1 is being written again")));
    ASSERT_EQ(seen_.withdrawn.size(), 1u);
    EXPECT_THAT(Look(seconds(9)), IsEmpty());
    EXPECT_THAT(Look(seconds(1)), ElementsAre("step1"));
    EXPECT_THAT(seen_.said, IsEmpty());
    EXPECT_THAT(Look(seconds(109)), IsEmpty());  // after its last change
    EXPECT_TRUE(shown().at(0).provisional);
    EXPECT_THAT(Look(seconds(1)), IsEmpty());
    ASSERT_EQ(shown().size(), 1u);
    EXPECT_FALSE(shown()[0].provisional);
    Write(1, "data", std::string(4000, 'z'));  // of another save
    Look();
    const bool owned = ownership != Ownership::kReference;
    EXPECT_THAT(Look(seconds(10)), ElementsAre(owned ? "step1-1" : "step1"));
  }
}

TEST_F(FollowCopyTest, AProvisionalStepIsNotConfirmedWhileSomebodyHasItOpen) {
  WriteStep(1, "");
  Write(1, "weights.pt", "x");
  Look();
  ASSERT_THAT(Look(seconds(10)), ElementsAre("step1"));
  Descriptor writer = *OpenDescriptor(directory_.path() + "/run7/step1/weights.pt", O_WRONLY);
  Look(seconds(200));
  EXPECT_TRUE(store_->Steps("run7")->at(0).provisional);
  writer = Descriptor();
  Look(seconds(10));
  EXPECT_FALSE(store_->Steps("run7")->at(0).provisional);
}

// Another follower finds what one before it had to take.
TEST_F(FollowCopyTest, AProvisionalCopyIsReplacedAfterARestart) {
  options_.adopt.ownership = Ownership::kCopy;
  MakeFollower();
  WriteStep(1, "");
  Look();
  ASSERT_THAT(Look(seconds(10)), ElementsAre("step1"));
  MakeFollower();
  Write(1, "data", std::string(4000, 'z'));
  Look();
  EXPECT_THAT(Look(seconds(10)), ElementsAre("step1"));
  EXPECT_EQ(store_->Steps("run7")->size(), 1u);
}

}  // namespace
}  // namespace ckptfs
