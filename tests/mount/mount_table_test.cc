// SPDX-License-Identifier: Apache-2.0

#include "mount/mount_table.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

TEST(ParseMountInfo, UnescapesAndSkipsOptionalFields) {
  const auto entries = ParseMountInfo(
      "22 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw\n"
      "nonsense\n"
      "\n"
      "40 22 0:39 / /mnt/a\\040b\\134c ro,nosuid - fuse.ckptfs /srv/my\\040store "
      "ro,user_id=1000,group_id=0\n"
      "41 22 0:40 / /cut rw shared:3\n");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].mountpoint, "/");
  EXPECT_EQ(entries[0].type, "ext4");
  EXPECT_EQ(entries[1].device, "0:39");
  EXPECT_EQ(entries[1].mountpoint, "/mnt/a b\\c");
  EXPECT_EQ(entries[1].type, "fuse.ckptfs");
  EXPECT_EQ(entries[1].source, "/srv/my store");
  EXPECT_EQ(entries[1].user, 1000u);
  EXPECT_FALSE(entries[0].user);
}

TEST(FindMount, KnowsProcAndNothingElse) {
  const auto proc = FindMount("/proc");  // the root of a chroot is no mount
  ASSERT_TRUE(proc) << proc.error().message;
  EXPECT_TRUE(*proc);
  const auto none = FindMount("/no/such/mount");
  ASSERT_TRUE(none);
  EXPECT_FALSE(*none);
}

TEST(SetReadAhead, NeedsAMount) {
  const Status done = SetReadAhead("/no/such/mount", 128);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kNotFound);
}

TEST(IsDeadMount, NeedsADaemonThatDied) {
  EXPECT_FALSE(IsDeadMount("/"));
  EXPECT_FALSE(IsDeadMount("/no/such/mount"));
}

}  // namespace
}  // namespace ckptfs
