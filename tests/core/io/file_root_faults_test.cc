// SPDX-License-Identifier: Apache-2.0

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "core/base/strings.h"
#include "core/io/file_root.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_io.h"

namespace ckptfs {
namespace {

// All that a root tells of a tree, as text.
Result<std::string> Describe(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  std::string out;
  for (const RootEntry& entry : entries) {
    const std::string path = JoinPath(directory, entry.name);
    out += StrCat(path, " ", static_cast<int>(entry.kind), " ", entry.link, "\n");
    CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(root, path));
    out += found ? StrCat(found->stamp.size, " ", found->access.mode, "\n") : "nothing\n";
    if (entry.kind == EntryKind::kDirectory && entry.link.empty()) {
      CKPT_ASSIGN_OR_RETURN(const std::string inner, Describe(root, path));
      out += inner;
    }
    if (entry.kind != EntryKind::kFile) continue;
    CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(root, path, 100));
    out += text;
  }
  return out;
}

TEST(FileRootFaultsTest, ADeviceThatFailsIsAnErrorAndNeverASmallerTree) {
  const TemporaryDirectory directory;
  directory.Write("a/b/one", "1");
  directory.Write("a/two", "22");
  directory.Write("three", "333");
  std::filesystem::create_symlink("two", directory.path() + "/a/alias");
  std::filesystem::create_symlink("b", directory.path() + "/a/folder");
  std::filesystem::create_symlink("nowhere", directory.path() + "/a/dangling");
  const FileRoot root(directory.path());
  const auto whole = Describe(root, "");
  ASSERT_TRUE(whole) << whole.error().message;
  EXPECT_THAT(*whole, testing::HasSubstr("a/dangling 2 nowhere\nnothing"));
  EXPECT_THAT(*whole, testing::HasSubstr("a/folder 1 b"));
  uint64_t calls = 0;
  {
    const WatchedIo watch;
    ASSERT_EQ(*Describe(root, ""), *whole);
    calls = watch.calls().size();
  }
  ASSERT_GT(calls, 20u);
  for (uint64_t n = 1; n <= calls; ++n) {
    const WatchedIo watch(n);
    const auto described = Describe(root, "");
    const SystemCall failed = watch.failed().value();
    ASSERT_FALSE(described) << failed.name << " " << failed.path << " failed unnoticed";
    EXPECT_THAT(described.error().message, testing::HasSubstr(directory.path())) << failed.name;
    EXPECT_EQ(described.error().code, ErrorCode::kIo) << failed.name;
  }
}

TEST(FileRootTest, MoreEntriesThanMemoryIsMeantForAreRefusedByTheirNumber) {
  const TemporaryDirectory directory;
  for (const char* name : {"a", "b", "c"}) directory.Write(name, "");
  EXPECT_EQ(ListDirectory(directory.path(), true, 3)->size(), 3u);
  const auto refused = ListDirectory(directory.path(), true, 2);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(refused.error().message,
            directory.path() + ": more than 2 entries; ckptfs does not look into such a directory");
}

}  // namespace
}  // namespace ckptfs
