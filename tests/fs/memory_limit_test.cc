// SPDX-License-Identifier: Apache-2.0

#include "fs/serve/memory_limit.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kNone = UINT64_MAX;

// A machine whose files say what a test wants.
class MemoryLimitTest : public ::testing::Test {
 protected:
  void Mounts(std::string_view lines) { files_.Write("proc/self/mountinfo", lines); }
  void Groups(std::string_view lines) { files_.Write("proc/self/cgroup", lines); }
  void Limit(const std::string& path, std::string_view text) {
    files_.Write("sys/fs/cgroup/" + path, text);
  }
  uint64_t Found() { return GroupMemoryLimit(files_.path()); }

  static constexpr std::string_view kUnified =
      "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
  static constexpr std::string_view kFirst =
      "31 25 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
      "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
  TemporaryDirectory files_;
};

TEST_F(MemoryLimitTest, NothingIsNoLimit) {
  EXPECT_EQ(Found(), kNone);
  Mounts(kUnified);
  EXPECT_EQ(Found(), kNone);
  Groups("0::/a/b\n");
  EXPECT_EQ(Found(), kNone);
}

TEST_F(MemoryLimitTest, UnifiedGroupsAndThoseAboveCount) {
  Mounts(kUnified);
  Groups("0::/a/b\n");
  Limit("a/b/memory.max", "max\n");
  EXPECT_EQ(Found(), kNone);
  Limit("a/memory.max", "4096000\n");
  EXPECT_EQ(Found(), 4096000u);
  Limit("a/b/memory.max", "5096000\n");
  EXPECT_EQ(Found(), 4096000u);
  Limit("memory.max", "1000\n");
  EXPECT_EQ(Found(), 1000u);
}

TEST_F(MemoryLimitTest, TheControllerOfVersionOneCounts) {
  Mounts(kFirst);
  Groups("9:cpu,cpuacct:/other\n4:memory:/jobs/7\n0::/\n");
  Limit("memory/memory.limit_in_bytes", "9223372036854771712\n");
  Limit("memory/jobs/memory.limit_in_bytes", "2000000\n");
  Limit("memory/jobs/7/memory.limit_in_bytes", "3000000\n");
  Limit("memory/other/memory.limit_in_bytes", "5\n");
  EXPECT_EQ(Found(), 2000000u);
}

TEST_F(MemoryLimitTest, BothVersionsAtOnce) {
  Mounts(std::string(kFirst) + "33 25 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  Groups("4:memory:/jobs\n0::/u\n");
  Limit("memory/jobs/memory.limit_in_bytes", "3000000\n");
  Limit("unified/u/memory.max", "2500000\n");
  EXPECT_EQ(Found(), 2500000u);
}

TEST_F(MemoryLimitTest, AContainerSeesItsPartOfTheHierarchy) {
  // The mount shows the container's group; the path begins at the machine's.
  Mounts("32 25 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  Groups("4:memory:/docker/abc/inner\n");
  Limit("memory/memory.limit_in_bytes", "7000\n");
  Limit("memory/inner/memory.limit_in_bytes", "9000\n");
  EXPECT_EQ(Found(), 7000u);
  // A path that does not lead through the mount: its top is all that is known.
  Groups("4:memory:/docker/abcdef\n");
  EXPECT_EQ(Found(), 7000u);
  Groups("4:memory:/../other\n");
  EXPECT_EQ(Found(), 7000u);
}

}  // namespace
}  // namespace ckptfs
