// SPDX-License-Identifier: Apache-2.0
#include "mount/daemon/hot_steps.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>

#include "core/base/strings.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

constexpr size_t kFile = size_t{1} << 20;

// Returns the bytes of this process that are locked in memory.
uint64_t LockedBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmLck:")) return std::stoull(line.substr(6)) << 10;
  }
  return 0;
}

// Returns what locking `bytes` adds to these; a sanitizer's mlock does nothing.
constexpr uint64_t Locked(uint64_t bytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  bytes = 0;
#endif
  return bytes;
}

class HotStepsTest : public testing::Test {
 protected:
  void SetUp() override {
    rlimit limit{};
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (geteuid() != 0 && limit.rlim_max < 8 * kFile) {
      GTEST_SKIP() << "8 MiB may not be locked (ulimit -l)";
    }
  }
  // A step of two files.
  Status Add(HotSteps& hot, int step) {
    std::vector<std::string> paths;
    for (int file = 0; file < 2; ++file) {
      paths.push_back(directory_.Write(StrCat(step, "-", file), std::string(kFile, 'x')));
    }
    return hot.Add(Record(step), paths);
  }
  static StepRecord Record(int step) {
    StepRecord record;
    record.run = "run";
    record.id = std::to_string(step);
    return record;
  }
  TemporaryDirectory directory_;
};

TEST_F(HotStepsTest, TheNewestStayLockedAndMakeRoom) {
  const uint64_t before = LockedBytes();
  {
    HotSteps hot(2, 100 * kFile);
    for (int step = 0; step < 4; ++step) {
      const Status added = Add(hot, step);
      ASSERT_TRUE(added) << added.error().message;
      EXPECT_EQ(LockedBytes() - before, Locked(std::min<uint64_t>(step + 1, 2) * 2 * kFile));
    }
    hot.Remove(Record(0));  // is not any more
    EXPECT_EQ(LockedBytes() - before, Locked(4 * kFile));
    hot.Remove(Record(3));
    EXPECT_EQ(LockedBytes() - before, Locked(2 * kFile));
    const HotStepsStatus status = hot.status();
    EXPECT_EQ(status.steps, 1u);
    EXPECT_EQ(status.bytes, 2 * kFile);
    EXPECT_EQ(status.why_not, "");
  }
  EXPECT_EQ(LockedBytes(), before);
}

TEST_F(HotStepsTest, TheBudgetIsKept) {
  const uint64_t before = LockedBytes();
  HotSteps hot(10, 5 * kFile);
  for (int step = 0; step < 4; ++step) ASSERT_TRUE(Add(hot, step));
  EXPECT_EQ(LockedBytes() - before, Locked(4 * kFile));
  HotSteps small(10, kFile);
  EXPECT_THAT(Add(small, 5).error().message, HasSubstr("--hot-memory"));
  EXPECT_THAT(small.status().why_not, HasSubstr("--hot-memory"));
  HotSteps none(0, 100 * kFile);
  EXPECT_TRUE(Add(none, 6));
  EXPECT_EQ(LockedBytes() - before, Locked(4 * kFile));
}

TEST_F(HotStepsTest, AFileThatIsGoneIsAnErrorAndLocksNothing) {
  const uint64_t before = LockedBytes();
  HotSteps hot(2, 100 * kFile);
  const std::string there = directory_.Write("there", std::string(kFile, 'x'));
  EXPECT_FALSE(hot.Add(Record(1), {there, directory_.path() + "/none"}));
  EXPECT_FALSE(hot.Add(Record(1), {there, directory_.path()}));
  EXPECT_EQ(LockedBytes(), before);
}

}  // namespace
}  // namespace ckptfs
