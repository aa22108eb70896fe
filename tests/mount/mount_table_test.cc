// SPDX-License-Identifier: Apache-2.0

#include "mount/fuse/mount_table.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

TEST(FindMount, KnowsProcAndNothingElse) {
  const auto proc = FindMount("/proc");  // the root of a chroot is not a mount
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
