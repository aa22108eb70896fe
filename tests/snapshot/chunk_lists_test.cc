// SPDX-License-Identifier: Apache-2.0
//
// Digests beside the files of steps of several daemons (core/blob/chunk_list.h): they are there
// before a record says so, whoever wrote the files, and go with their step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "core/io/file_storage.h"
#include "core/store/collect.h"
#include "core/store/store_index.h"
#include "tests/snapshot/killed.h"
#include "tests/snapshot/nodes.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using State = AttemptNews::State;
using testing::IsEmpty;
using testing::SizeIs;
using testing_support::AttemptOf;
using testing_support::IsStepThere;
using testing_support::Node;
using testing_support::RecordsIn;

constexpr uint64_t kListedElements = 150'000;  // elements of a rank whose file has a list
const AttemptName kListedSave = AttemptOf(1, 4);

std::vector<std::string> ListsIn(const Storage& storage) {
  auto paths = *ListFilesBelow(storage, "blobs");
  std::erase_if(paths, [](const std::string& path) { return !path.ends_with(".digests"); });
  return paths;
}

// The part with rank 2 becomes what a build before lists would have left: all digests in the part.
void MakeOlder(Storage& storage) {
  for (const std::string& path : RecordsIn(storage)) {
    const CommitName name = *ParseCommitName(path);
    PreparedPart part = *ParsePart(*ReadWhole(storage, path, 1 << 20), name);
    if (part.ranks[0].rank != 2) continue;
    for (PreparedRank& rank : part.ranks) {
      const auto file = ReadWhole(storage, StrCat("blobs/", part.PathOf(rank.rank)), 1 << 24);
      const Blob blob = FileOf(part, rank);
      ASSERT_TRUE(storage.Remove(StrCat("blobs/", ChunkListPath(blob))));
      rank.chunks = ChunkDigestsOf(*file);
      rank.chunk_list = {};
    }
    ASSERT_TRUE(storage.Remove(path));
    ASSERT_TRUE(PublishText(storage, path, RenderPart(part)));
  }
}

TEST(ChunkListsTest, DigestsOfAPartWithoutListsGoIntoTheManifest) {
  const auto disk = std::make_shared<MemoryRoot>("disk");
  const Node a(disk), b(disk);
  ASSERT_TRUE(a.Prepare(kListedSave, 7, {0, 1}, 4, kListedElements) &&
              b.Prepare(kListedSave, 7, {2, 3}, 4, kListedElements));
  EXPECT_THAT(ListsIn(*disk), SizeIs(4));
  MakeOlder(*disk);
  EXPECT_THAT(ListsIn(*disk), SizeIs(2));
  const Node c(disk);
  ASSERT_EQ(c.commit->Look(kListedSave, true)->state, State::kDurable);
  EXPECT_TRUE(IsStepThere(disk, "7", 7, 4, kListedElements));
  const auto step = *c.store->Load(*c.store->Resolve("run", "7"));
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(step->model.blobs[rank].chunk_list == Digest{}, rank >= 2) << rank;
    EXPECT_EQ(step->model.blobs[rank].chunks.empty(), rank < 2) << rank;
  }
}

// A daemon that was updated goes on with what the one before it had written.
TEST(ChunkListsTest, FilesOfAnOlderBuildGetLists) {
  const auto disk = std::make_shared<MemoryRoot>("disk");
  const Node a(disk);
  ASSERT_TRUE(a.Prepare(kListedSave, 7, {0, 1}, 4, kListedElements));
  {
    const Node old(disk);
    ASSERT_TRUE(old.Prepare(kListedSave, 7, {2, 3}, 4, kListedElements));
  }
  MakeOlder(*disk);
  EXPECT_THAT(ListsIn(*disk), SizeIs(2));
  const Node b(disk);
  ASSERT_TRUE(b.Prepare(kListedSave, 7, {2, 3}, 4, kListedElements));
  EXPECT_THAT(ListsIn(*disk), SizeIs(4));
  const auto news = a.commit->Look(kListedSave, true);
  ASSERT_TRUE(news) << news.error().message;
  EXPECT_EQ(news->state, State::kDurable);
  EXPECT_TRUE(IsStepThere(disk, "7", 7, 4, kListedElements));
}

TEST(ChunkListsTest, TheyGoWithTheirStep) {
  const TemporaryDirectory directory;
  const std::shared_ptr<Storage> disk(*FileStorage::Open(directory.path(), true));
  constexpr std::chrono::milliseconds kOften{1};  // what a daemon has in work is said anew
  const Node a(disk, directory.path(), kOften), b(disk, directory.path(), kOften);
  ASSERT_TRUE(a.Prepare(kListedSave, 7, {0, 1}, 4, kListedElements) &&
              b.Prepare(kListedSave, 7, {2, 3}, 4, kListedElements));
  ASSERT_TRUE(a.store->Collect({}));
  EXPECT_THAT(ListsIn(*disk), SizeIs(4)) << "of a save that is prepared";
  ASSERT_EQ(a.commit->Look(kListedSave, true)->state, State::kDurable);
  ASSERT_EQ(b.commit->Look(kListedSave, false)->state, State::kDurable);
  ASSERT_TRUE(a.store->Collect({}));
  EXPECT_THAT(ListsIn(*disk), SizeIs(4)) << "of a step";
  const StepRecord record = *a.store->Resolve("run", "7");
  testing_support::ExpectVerified(**a.store->Load(record));
  ASSERT_TRUE(a.commit->FinishOthers(WorldCommit::Clock::now(), std::chrono::hours(1)));
  EXPECT_THAT(RecordsIn(*disk), IsEmpty());
  ASSERT_TRUE(a.store->Remove(record));
  for (int tries = 0; tries < 100 && !ListsIn(*disk).empty(); ++tries) {
    ASSERT_TRUE(a.store->Collect({}));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_THAT(*ListFilesBelow(*disk, "blobs"), IsEmpty());
}

}  // namespace
}  // namespace ckptfs
