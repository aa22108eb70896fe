// SPDX-License-Identifier: Apache-2.0

#include "core/io/mount_info.h"

#include <gtest/gtest.h>

#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

TEST(ReadMounts, UnescapesAndSkipsOptionalFields) {
  TemporaryDirectory files;
  files.Write("mountinfo",
              "22 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw\n"
              "nonsense\n"
              "\n"
              "40 22 0:39 /run\\0401 /mnt/a\\040b\\134c ro,nosuid - fuse.ckptfs /srv/my\\040store "
              "ro,user_id=1000,group_id=0\n"
              "41 22 0:40 / /cut rw shared:3\n");
  const auto entries = ReadMounts(files.path() + "/mountinfo");
  ASSERT_TRUE(entries) << entries.error().message;
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ(entries->front().mountpoint, "/");
  EXPECT_EQ(entries->front().type, "ext4");
  EXPECT_FALSE(MountOption(entries->front().options, "user_id"));
  const MountEntry& ours = entries->back();
  EXPECT_EQ(ours.device, "0:39");
  EXPECT_EQ(ours.root, "/run 1");
  EXPECT_EQ(ours.mountpoint, "/mnt/a b\\c");
  EXPECT_EQ(ours.type, "fuse.ckptfs");
  EXPECT_EQ(ours.source, "/srv/my store");
  EXPECT_EQ(MountOption(ours.options, "user_id"), "1000");
  EXPECT_EQ(MountOption(ours.options, "ro"), "");
}

TEST(ReadMounts, KnowsThisMachine) {
  const auto entries = ReadMounts();
  ASSERT_TRUE(entries) << entries.error().message;
  EXPECT_FALSE(entries->empty());
  EXPECT_FALSE(ReadMounts("/no/such/file"));
}

}  // namespace
}  // namespace ckptfs
