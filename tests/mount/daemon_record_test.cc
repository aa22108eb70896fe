// SPDX-License-Identifier: Apache-2.0

#include "mount/control/daemon_record.h"

#include <gtest/gtest.h>

#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

// `umount --lazy` lets the next daemon begin while files of the first one are open.  A filesystem
// may give the second record the inode number of the first, which is removed by then.
TEST(DaemonRecord, TheEndOfAPredecessorLeavesTheRecordOfItsSuccessor) {
  const TemporaryDirectory folder;
  const std::string store = folder.path() + "/store", mountpoint = folder.path() + "/mnt";
  auto first = DaemonRecord::Write(store, mountpoint, "first.log", "");
  ASSERT_TRUE(first) << first.error().message;
  const auto second = DaemonRecord::Write(store, mountpoint, "second.log", "");
  ASSERT_TRUE(second) << second.error().message;
  first->reset();
  const auto found = FindDaemonRecords(store);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].log, "second.log");
}

TEST(DaemonRecord, GoesWithItsDaemon) {
  const TemporaryDirectory folder;
  const std::string store = folder.path() + "/store";
  auto record = DaemonRecord::Write(store, folder.path() + "/mnt", "log", "");
  ASSERT_TRUE(record) << record.error().message;
  EXPECT_EQ(FindDaemonRecords(store).size(), 1u);
  record->reset();
  EXPECT_EQ(FindDaemonRecords(store).size(), 0u);
}

}  // namespace
}  // namespace ckptfs
