// SPDX-License-Identifier: Apache-2.0

#include "fs/permissions.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "fs/errno_map.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

using testing::TreeFixture;

constexpr Caller kStranger{12345, 12345, 0};

TEST(PermissionsTest, StepsOfOthersAreNotThere) {
  TreeFixture t;
  t.AddStep("mine", "s", 1, 1, 0600);
  t.AddStep("all", "s", 1, 2, 0644);
  FilesystemOptions options;
  options.run = "mine";
  t.Mount(options);
  EXPECT_EQ(t.List("/run").value(), (std::vector<std::string>{"all", "mine"}));
  EXPECT_EQ(t.List("/run", kStranger).value(), (std::vector<std::string>{"all"}));
  EXPECT_EQ(t.Walk("/run/mine", kStranger).error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(t.Walk("/view", kStranger));
  EXPECT_EQ(t.List("/", kStranger).value(), (std::vector<std::string>{".ckptfs", "ingest", "run"}));
  EXPECT_TRUE(t.ReadAll("/run/all/step/s/view/tp1/rank0/model.bin", kStranger));
  // Knowing the inode does not help.
  const auto file = t.Walk("/run/mine/step/s/view/tp1/rank0/model.bin").value();
  EXPECT_EQ(t.fs().Open(file.inode, 0, kStranger).error().code, ErrorCode::kPermission);
  EXPECT_EQ(t.fs().GetAttributes(file.inode, kStranger).error().code, ErrorCode::kPermission);
  EXPECT_EQ(file.mode & 0777, 0400u);
  EXPECT_EQ(file.uid, geteuid());
}

TEST(PermissionsTest, DirectoriesAboveCount) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  chmod((t.directory() + "/source").c_str(), 0700);
  t.Mount();
  EXPECT_FALSE(t.Walk("/run/r", kStranger));
  EXPECT_EQ(t.Walk("/run/r/step/s/info.json").value().mode & 0777, 0400u);
  TreeFixture open;
  open.AddStep("r", "s", 1);
  chmod((open.directory() + "/source").c_str(), 0711);
  open.Mount();
  EXPECT_TRUE(open.ReadAll("/view/tp1/rank0/model.bin", kStranger));
}

TEST(PermissionsTest, FilesWithAnAclAreTheOwners) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  // user::rw-, user:12345:r--, group::r--, mask::r--, other::r--
  const std::array<uint16_t, 22> acl{2,      0,      1,    6, 0xffff, 0xffff, 2,    4,
                                     12345,  0,      4,    4, 0xffff, 0xffff, 0x10, 4,
                                     0xffff, 0xffff, 0x20, 4, 0xffff, 0xffff};
  const std::string path = t.SourcePath("r", "s");
  if (setxattr(path.c_str(), "system.posix_acl_access", acl.data(), sizeof(acl), 0) != 0) {
    GTEST_SKIP() << "no ACLs here: " << std::strerror(errno);
  }
  t.Mount();
  EXPECT_FALSE(t.Walk("/run/r", kStranger));
}

TEST(PermissionsTest, SupplementaryGroupsCount) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to be somebody else";
  const pid_t child = fork();
  if (child == 0) {
    const std::array<gid_t, 2> groups{500, 777};
    if (setgroups(groups.size(), groups.data()) != 0) _exit(1);
    pause();
  }
  GroupCache cache;
  std::vector<uint32_t> groups;
  for (int i = 0; i < 500 && groups.size() < 3; ++i) {
    usleep(10'000);
    groups = GroupCache().Of({12345, 100, static_cast<uint32_t>(child)});
    if (std::find(groups.begin(), groups.end(), 777u) != groups.end()) break;
  }
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_EQ(groups, (std::vector<uint32_t>{100, 500, 777}));
  EXPECT_EQ(cache.Of({12345, 100, 0}), (std::vector<uint32_t>{100}));
}

TEST(PermissionsTest, ErrorsHaveTheirNumbers) {
  EXPECT_EQ(ErrnoOf(ErrorCode::kStale), ESTALE);
  EXPECT_EQ(ErrnoOf(ErrorCode::kDataLoss), EIO);
  EXPECT_EQ(ErrnoOf(ErrorCode::kNotFound), ENOENT);
  EXPECT_EQ(ErrnoOf(ErrorCode::kPermission), EACCES);
  EXPECT_EQ(kReadOnlyErrno, EROFS);
}

}  // namespace
}  // namespace ckptfs
