// SPDX-License-Identifier: Apache-2.0

#include "core/io/tree_watch.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Far beyond what hearing takes, and what a wait that heard nothing would take.
constexpr milliseconds kLong(20'000);

class TreeWatchTest : public testing::Test {
 protected:
  // Returns true if a wait ends long before its time.
  bool Hears(TreeWatch& watch) {
    const auto start = Clock::now();
    watch.Wait(kLong);
    return Clock::now() - start < kLong / 2;
  }
  TemporaryDirectory directory_;
};

TEST_F(TreeWatchTest, HearsWhatIsWrittenBelow) {
  directory_.Write("run/step1/file", "a");
  auto watch = *TreeWatch::Create(directory_.path() + "/run");
  if (!watch.hears()) GTEST_SKIP() << "this filesystem is polled";
  directory_.Write("run/step1/file", "b");
  EXPECT_TRUE(Hears(watch));
  directory_.Write("run/step2/deeper/file", "a");  // new directories
  EXPECT_TRUE(Hears(watch));
  watch.Wait(milliseconds(10));  // drains its other events
  directory_.Write("run/step2/deeper/another", "a");
  EXPECT_TRUE(Hears(watch));
  std::filesystem::remove_all(directory_.path() + "/run/step1");
  EXPECT_TRUE(Hears(watch));
}

TEST_F(TreeWatchTest, HearsTheDirectoryThatTookItsPlace) {
  directory_.Write("run/file", "a");
  auto watch = *TreeWatch::Create(directory_.path() + "/run");
  if (!watch.hears()) GTEST_SKIP() << "this filesystem is polled";
  std::filesystem::rename(directory_.path() + "/run", directory_.path() + "/away");
  EXPECT_TRUE(Hears(watch));
  directory_.Write("run/file", "a");
  watch.Wait(milliseconds(10));
  ASSERT_TRUE(watch.hears());
  directory_.Write("run/file", "b");
  EXPECT_TRUE(Hears(watch));
}

TEST_F(TreeWatchTest, SaysNothingWhereNothingHappens) {
  directory_.Write("run/file", "a");
  auto watch = *TreeWatch::Create(directory_.path() + "/run");
  directory_.Write("elsewhere/file", "a");
  const auto start = Clock::now();
  watch.Wait(milliseconds(50));
  EXPECT_GE(Clock::now() - start, milliseconds(50));
}

TEST_F(TreeWatchTest, HearsNothingWhereFilesChangeWithoutEvents) {
  auto watch = *TreeWatch::Create("/proc/self");
  EXPECT_FALSE(watch.hears());
  watch.Wait(milliseconds(1));
  EXPECT_FALSE(watch.hears());
}

TEST_F(TreeWatchTest, HearsOfWhatWasMovedThere) {
  directory_.Write("run/file", "a");
  directory_.Write("tmp-step1/file", "a");
  auto watch = *TreeWatch::Create(directory_.path() + "/run");
  if (!watch.hears()) GTEST_SKIP() << "this filesystem is polled";
  std::filesystem::rename(directory_.path() + "/tmp-step1", directory_.path() + "/run/step1");
  EXPECT_TRUE(Hears(watch));
  directory_.Write("run/step1/another", "a");
  EXPECT_TRUE(Hears(watch));
}

TEST_F(TreeWatchTest, IsWokenByOthers) {
  auto watch = *TreeWatch::Create(directory_.path() + "/not there yet");
  EXPECT_FALSE(watch.hears());
  std::thread other([&] { watch.Wake(); });
  EXPECT_TRUE(Hears(watch));
  other.join();
}

TEST_F(TreeWatchTest, ADirectoryThatComesLaterIsHeardThen) {
  auto watch = *TreeWatch::Create(directory_.path() + "/run");
  directory_.Write("run/file", "a");
  watch.Wait(milliseconds(1));
  if (!watch.hears()) GTEST_SKIP() << "this filesystem is polled";
  directory_.Write("run/another", "a");
  EXPECT_TRUE(Hears(watch));
}

TEST_F(TreeWatchTest, MoreDirectoriesThanAreWatchedArePolled) {
  const TemporaryDirectory& directory = directory_;
  for (int i = 0; i < 999; ++i) {
    std::filesystem::create_directory(directory.path() + "/" + std::to_string(i));
  }
  auto watch = TreeWatch::Create(directory.path());
  ASSERT_TRUE(watch);
  if (!watch->hears()) GTEST_SKIP() << "this filesystem is polled";
  std::filesystem::create_directory(directory.path() + "/one more");
  watch->Wait(std::chrono::milliseconds(0));
  EXPECT_FALSE(watch->hears());
  // Nobody is woken by what is heard all the same.
  directory.Write("0/x", "");
  const auto begin = std::chrono::steady_clock::now();
  watch->Wait(std::chrono::milliseconds(50));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(50));
  std::filesystem::remove(directory.path() + "/one more");
  watch->Wait(std::chrono::milliseconds(0));
  EXPECT_TRUE(watch->hears());
}

}  // namespace
}  // namespace ckptfs
