// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/mountpoint_claim.h"

#include <gtest/gtest.h>

#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

TEST(MountpointClaimTest, OneProcessHasAName) {
  const TemporaryDirectory folder;
  {
    auto first = MountpointClaim::Take(folder.path());
    ASSERT_TRUE(first) << first.error().message;
    const auto second = MountpointClaim::Take(folder.path());
    ASSERT_FALSE(second);
    EXPECT_EQ(second.error().code, ErrorCode::kExists);
    EXPECT_TRUE(MountpointClaim::Take(folder.path() + "/other"));
  }
  EXPECT_TRUE(MountpointClaim::Take(folder.path()));
}

// Two users each get the name, since their runtime directories differ.
TEST(MountpointClaimTest, OneProcessHasTheDirectory) {
  const TemporaryDirectory folder;
  auto first = MountpointClaim::Take(folder.path() + "/.");
  auto second = MountpointClaim::Take(folder.path());
  ASSERT_TRUE(first && second);
  ASSERT_TRUE(first->TakeDirectory());
  const Status taken = second->TakeDirectory();
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, ErrorCode::kExists);
}

}  // namespace
}  // namespace ckptfs
