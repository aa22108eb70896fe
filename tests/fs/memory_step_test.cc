// SPDX-License-Identifier: Apache-2.0
//
// A step that is mounted while it is only in memory, and stored while its files
// are open: the same bytes under the same inodes before and after, and nothing
// holds the memory once the last reader has gone.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <memory>

#include "core/base/strings.h"
#include "tests/fs/tree_fixture.h"

namespace ckptfs::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

constexpr uint32_t kSeed = 7;
const Caller kRoot{.uid = 0, .gid = 0, .pid = 0};

struct Seen {
  InodeNumber inode{};
  std::string bytes;
  bool operator==(const Seen&) const = default;
};

class MemoryStepTest : public ::testing::TestWithParam<size_t> {
 protected:
  // Every file below a directory.
  void Collect(const std::string& directory, std::map<std::string, Seen>& files) {
    const auto names = tree_.List(directory, kRoot);
    ASSERT_TRUE(names) << names.error().message;
    for (const std::string& name : *names) {
      const std::string path = StrCat(directory, "/", name);
      const auto attributes = tree_.Walk(path, kRoot);
      ASSERT_TRUE(attributes) << attributes.error().message;
      if (S_ISDIR(attributes->mode)) {
        Collect(path, files);
        continue;
      }
      auto bytes = tree_.ReadAll(path, kRoot);
      ASSERT_TRUE(bytes) << path << ": " << bytes.error().message;
      files[path] = {attributes->inode, *std::move(bytes)};
    }
  }
  std::map<std::string, Seen> Files(const std::string& step) {
    std::map<std::string, Seen> files;
    for (const char* below : {"/view/tp2", "/view/tp4_dp2", "/param", "/source"}) {
      Collect(StrCat("run/run/step/", step, below), files);
    }
    return files;
  }

  TreeFixture tree_;
};

TEST_P(MemoryStepTest, IsTheSameBeforeAndAfterItIsStored) {
  tree_.AddStep("run", "s1", 1);
  std::weak_ptr<const std::string> memory;
  const StepRecord record = tree_.HoldStep("run", "s2", 2, kSeed, GetParam(), &memory);
  EXPECT_FALSE(tree_.store().Resolve("run", "s2"));
  FilesystemOptions options;
  options.follow = true;
  Filesystem& fs = tree_.Mount(std::move(options));
  EXPECT_THAT(*tree_.List("run/run/step", kRoot), ElementsAre("s1", "s2"));
  const std::map<std::string, Seen> before = Files("s2");
  const Layout tp2 = *Layout::Parse("tp2");
  EXPECT_EQ(before.at("run/run/step/s2/view/tp2/rank1/model.bin").bytes,
            TreeFixture::Expected(kSeed, tp2, "rank1/model.bin"));
  EXPECT_EQ(before.at("run/run/step/s2/view/tp2/rank0/whole.bin").bytes,
            TreeFixture::SourceBytes(kSeed));

  std::map<std::string, FileHandle> open;
  for (const auto& [path, seen] : before) {
    const auto handle = fs.Open(tree_.Walk(path, kRoot)->inode, 0, kRoot);
    ASSERT_TRUE(handle) << handle.error().message;
    open[path] = handle->handle;
  }
  const auto stored = tree_.catalogue().Persist(record);
  ASSERT_TRUE(stored) << stored.error().message;
  EXPECT_EQ(stored->id, "s2");
  EXPECT_EQ(stored->manifest, record.manifest);
  ASSERT_TRUE(fs.Refresh());
  for (const auto& [path, handle] : open) {
    EXPECT_EQ(*ReadHandle(fs, handle), before.at(path).bytes) << path;
  }
  EXPECT_TRUE(Files("s2") == before);
  EXPECT_FALSE(memory.expired());  // a reader with an open file goes on with it
  for (const auto& [path, handle] : open) fs.Release(handle);
  EXPECT_TRUE(Files("s2") == before);
  EXPECT_TRUE(memory.expired());
  EXPECT_TRUE(std::filesystem::exists(tree_.store().blobs() + "/run/s2/data.bin"));

  tree_.Mount();  // a new daemon
  EXPECT_TRUE(Files("s2") == before);
}

TEST_P(MemoryStepTest, IsShownByViewAndGoesWhenItIsReleased) {
  tree_.AddStep("run", "s1", 1);
  FilesystemOptions options;
  options.follow = true;
  Filesystem& fs = tree_.Mount(std::move(options));
  EXPECT_EQ(tree_.Walk("view/tp2/rank0/model.bin", kRoot)->inode,
            tree_.Walk("run/run/step/s1/view/tp2/rank0/model.bin", kRoot)->inode);
  std::weak_ptr<const std::string> memory;
  const StepRecord record = tree_.HoldStep("run", "s2", 2, kSeed, GetParam(), &memory);
  ASSERT_TRUE(fs.Refresh());
  EXPECT_EQ(tree_.Walk("view/tp2/rank0/model.bin", kRoot)->inode,
            tree_.Walk("run/run/step/s2/view/tp2/rank0/model.bin", kRoot)->inode);
  ASSERT_TRUE(tree_.catalogue().Release(record));
  ASSERT_TRUE(fs.Refresh());
  EXPECT_THAT(*tree_.List("run/run/step", kRoot), UnorderedElementsAre("s1"));
  EXPECT_TRUE(memory.expired());
}

// A step that several daemons hold (core/peer) is never `latest`, and comes and goes under its own
// name.
TEST_P(MemoryStepTest, OfSeveralDaemonsHasAPlaceOfItsOwn) {
  tree_.AddStep("run", "7", 7);
  FilesystemOptions options;
  options.follow = true;
  Filesystem& fs = tree_.Mount(std::move(options));
  std::weak_ptr<const std::string> memory;
  EXPECT_THAT(*tree_.List("run/run", kRoot), ElementsAre("step"));
  tree_.HoldStep("run", "7", 7, 3, GetParam(), &memory, StepPlace::kMemory);
  const StepRecord alone =
      tree_.HoldStep("other", "9", 9, kSeed, GetParam(), &memory, StepPlace::kMemory);
  ASSERT_TRUE(fs.Refresh());
  EXPECT_THAT(*tree_.List("run/run", kRoot), UnorderedElementsAre("memory", "step"));
  EXPECT_THAT(*tree_.List("run/other/step", kRoot), ElementsAre());
  const Layout tp2 = *Layout::Parse("tp2");
  EXPECT_EQ(*tree_.ReadAll("run/other/memory/9/view/tp2/rank1/model.bin", kRoot),
            TreeFixture::Expected(kSeed, tp2, "rank1/model.bin"));
  EXPECT_EQ(*tree_.ReadAll("run/run/memory/7/view/tp2/rank1/model.bin", kRoot),
            TreeFixture::Expected(3, tp2, "rank1/model.bin"));
  EXPECT_EQ(*tree_.ReadAll("run/run/step/7/view/tp2/rank1/model.bin", kRoot),
            TreeFixture::Expected(1, tp2, "rank1/model.bin"));
  EXPECT_EQ(tree_.Walk("view/tp2/rank1/model.bin", kRoot)->inode,
            tree_.Walk("run/run/step/7/view/tp2/rank1/model.bin", kRoot)->inode)
      << "latest is durable";
  // Another one of that name takes its place.
  tree_.HoldStep("run", "7", 7, 4, GetParam(), &memory, StepPlace::kMemory);
  ASSERT_TRUE(fs.Refresh());
  EXPECT_EQ(*tree_.ReadAll("run/run/memory/7/view/tp2/rank1/model.bin", kRoot),
            TreeFixture::Expected(4, tp2, "rank1/model.bin"));
  tree_.catalogue().HideMemory(alone);
  ASSERT_TRUE(fs.Refresh());
  EXPECT_THAT(*tree_.List("run", kRoot), ElementsAre("run")) << "a run without steps is not a name";
  EXPECT_FALSE(fs.StatusJson().empty());
}

// One span, which can be mapped, and a rope of many.
INSTANTIATE_TEST_SUITE_P(Ropes, MemoryStepTest, ::testing::Values(size_t{64} << 20, 100'003));

}  // namespace
}  // namespace ckptfs::testing
