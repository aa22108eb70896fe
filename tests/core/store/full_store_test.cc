// SPDX-License-Identifier: Apache-2.0
//
// Removing and collecting on a filesystem that has no byte and no inode left: what exists can be
// renamed and removed there, and nothing can be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "core/base/digest.h"
#include "core/base/strings.h"
#include "core/io/blob_directories.h"
#include "core/io/file_storage.h"
#include "core/records/records.h"
#include "core/store/collect.h"
#include "core/store/store_index.h"
#include "tests/core/store/counting_storage.h"
#include "tests/core/store/sample_model.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using testing::UnorderedElementsAre;
using testing_support::CountingStorage;
using testing_support::TinyModel;

class FullStorage final : public CountingStorage {
 public:
  using CountingStorage::CountingStorage;
  Result<std::unique_ptr<StorageWriter>> Create(std::string_view path) override {
    if (full) return Fail(ErrnoError(ENOSPC, path));
    return CountingStorage::Create(path);
  }
  Status PublishIfAbsent(std::string_view path, std::span<const std::byte> bytes) override {
    if (full) return Fail(ErrnoError(ENOSPC, path));
    return CountingStorage::PublishIfAbsent(path, bytes);
  }
  bool full = false;
};

class FullStoreTest : public testing::Test {
 protected:
  FullStoreTest() : directory_(temporary_.path() + "/store") {
    (void)*Store::Open(directory_, true);
    storage_ = std::make_shared<FullStorage>(*FileStorage::Open(directory_, false));
    store_ = *Store::OpenOn(storage_, false, directory_);
  }

  // A step with a directory of blobs of its own, as `adopt --copy` makes them.
  StepRecord Publish(const std::string& id, uint64_t iteration, bool replace = false) {
    StepModel model = TinyModel(id, iteration, static_cast<int64_t>(iteration));
    const std::string blobs = DigestOf(StrCat(id, " ", iteration)).Hex();
    fs::create_directories(Below(StrCat("blobs/", blobs, "/tag")));
    model.roots = {StrCat(directory_, "/blobs/", blobs)};
    Blob blob;
    blob.path = "tag/file";
    blob.stamp.size = 1;
    blob.store_owned = true;
    blob.chunk_bytes = 256 << 10;
    blob.chunks = {DigestOf("x")};
    model.blobs = {blob};
    (void)*HoldBlobDirectory(directory_, blobs);
    PublishHow how;
    how.replace = replace;
    auto record = store_->Publish("a", model, "/s", "/r", how);
    EXPECT_TRUE(record) << record.error().message;
    return record ? *record : StepRecord{};
  }
  CollectReport Collect(uint64_t keep_last = 0) {
    CollectRequest request;
    request.keep_last = keep_last;
    auto report = store_->Collect(request);
    EXPECT_TRUE(report) << report.error().message;
    return report ? *std::move(report) : CollectReport{};
  }
  std::string Below(const std::string& path) const { return StrCat(directory_, "/", path); }
  std::vector<std::string> In(const std::string& folder) const {
    std::vector<std::string> names;
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(Below(folder), none)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }
  std::vector<std::string> Ids(Store& store) {
    std::vector<std::string> ids;
    EXPECT_TRUE(store.Refresh());
    const auto steps = store.Steps("a");
    for (const StepRecord& step : steps ? *steps : std::vector<StepRecord>())
      ids.push_back(step.id);
    return ids;
  }

  TemporaryDirectory temporary_;
  const std::string directory_;
  std::shared_ptr<FullStorage> storage_;
  std::unique_ptr<Store> store_;
};

TEST_F(FullStoreTest, AnyNumberOfStepsIsRemoved) {
  for (uint64_t i = 0; i < 20; ++i) Publish(std::to_string(100 + i), i);
  const auto other = *Store::Open(directory_, false);  // another process that has it open
  ASSERT_THAT(Ids(*other), SizeIs(20));
  storage_->full = true;
  for (uint64_t i = 0; i < 19; ++i) {
    const Status removed = store_->Remove(*store_->Resolve("a", std::to_string(100 + i)));
    ASSERT_TRUE(removed) << removed.error().message;
  }
  EXPECT_THAT(In("deleted"), IsEmpty());
  EXPECT_THAT(Ids(*store_), ElementsAre("119"));
  ASSERT_TRUE(other->RefreshStep("a", "100"));
  EXPECT_FALSE(other->Resolve("a", "100"));
  EXPECT_THAT(Ids(*other), ElementsAre("119"));
  const CollectReport report = Collect();
  EXPECT_EQ(report.manifests, 19u);
  EXPECT_EQ(report.directories, 19u);
  EXPECT_THAT(report.notes, IsEmpty());
  EXPECT_THAT(In("manifests"), SizeIs(1));
  EXPECT_THAT(In("blobs"), SizeIs(1));
}

TEST_F(FullStoreTest, APolicyRemovesAndReclaimsAtOnce) {
  for (uint64_t i = 0; i < 5; ++i) Publish(std::to_string(i), i);
  storage_->full = true;
  const CollectReport report = Collect(1);
  EXPECT_THAT(report.removed, SizeIs(4));
  EXPECT_EQ(report.directories, 4u);
  EXPECT_THAT(report.notes, IsEmpty());
  EXPECT_THAT(Ids(*store_), ElementsAre("4"));
  EXPECT_THAT(In("blobs"), SizeIs(1));
}

TEST_F(FullStoreTest, TheNumberOfARetiredStepStaysUsed) {
  const StepRecord first = Publish("s", 1);
  storage_->full = true;
  ASSERT_TRUE(store_->Remove(first));
  EXPECT_EQ(store_->Remove(first).error().code, ErrorCode::kNotFound);
  EXPECT_THAT(In("steps/a/s"), ElementsAre("0.deleted"));
  storage_->full = false;
  const StepRecord second = Publish("s", 2);
  EXPECT_THAT(In("steps/a/s"), UnorderedElementsAre("0.deleted", "1"));
  EXPECT_EQ(store_->Remove(first).error().code, ErrorCode::kNotFound);
  ASSERT_TRUE(store_->Remove(second));
}

// Where there is room again the deletion is published, and nobody lists the record any more.
TEST_F(FullStoreTest, ACollectionWithRoomMakesDeletionsOfThem) {
  const StepRecord first = Publish("s", 1);
  storage_->full = true;
  ASSERT_TRUE(store_->Remove(first));
  Collect();
  EXPECT_THAT(In("steps/a/s"), ElementsAre("0.deleted"));
  storage_->full = false;
  Collect();
  EXPECT_THAT(In("steps/a"), IsEmpty());
  EXPECT_THAT(In("deleted/a/s"), ElementsAre("0"));
  EXPECT_EQ(Publish("s", 2).iteration, 2u);
  EXPECT_THAT(In("steps/a/s"), ElementsAre("1"));
}

// Killed between the record of what a step replaced and its own, it is there; and what it
// replaced never comes back, although nobody said that it is deleted.
TEST_F(FullStoreTest, WhatAStepReplacedGoesBeforeIt) {
  Publish("s", 1);
  const StepRecord second = Publish("s", 2, true);
  fs::remove(Below("deleted/a/s/0"));
  storage_->full = true;
  ASSERT_TRUE(FileStorage::Rename(directory_, "steps/a/s/0", "steps/a/s/0.deleted"));
  EXPECT_THAT(Ids(*store_), ElementsAre("s"));
  EXPECT_EQ(store_->Resolve("a", "s")->iteration, 2u);
  ASSERT_TRUE(FileStorage::Rename(directory_, "steps/a/s/0.deleted", "steps/a/s/0"));
  ASSERT_TRUE(store_->Remove(second));
  EXPECT_THAT(In("steps/a/s"), UnorderedElementsAre("0.deleted", "1.deleted"));
  EXPECT_THAT(Ids(*store_), IsEmpty());
  storage_->full = false;
  Collect();
  EXPECT_THAT(In("deleted/a/s"), UnorderedElementsAre("0", "1"));
  EXPECT_THAT(Ids(*store_), IsEmpty());
}

// A build that does not know of retired records takes the number again: its step is there.
TEST_F(FullStoreTest, ARecordBesideItsRetiredNameIsAStep) {
  const StepRecord first = Publish("s", 1);
  storage_->full = true;
  ASSERT_TRUE(store_->Remove(first));
  fs::copy_file(Below("steps/a/s/0.deleted"), Below("steps/a/s/0"));
  EXPECT_THAT(Ids(*store_), ElementsAre("s"));
  Collect();
  EXPECT_THAT(In("manifests"), SizeIs(1));
  storage_->full = false;
  Collect();
  EXPECT_THAT(In("manifests"), SizeIs(1));
  ASSERT_TRUE(store_->Remove(*store_->Resolve("a", "s")));
  EXPECT_THAT(Ids(*store_), IsEmpty());
}

// The lock that its remover needs is there as long as it is.
TEST_F(FullStoreTest, AHalfRemovedDirectoryKeepsItsLock) {
  const std::string name = DigestOf("x").Hex();
  (void)*HoldBlobDirectory(directory_, name);
  fs::create_directories(Below(StrCat("blobs/", name, ".partial-abcdef")));
  RemoveUnusedHolds(directory_);
  EXPECT_THAT(In("holds"), ElementsAre(name));
  EXPECT_EQ(Collect().directories, 1u);
  EXPECT_THAT(In("blobs"), IsEmpty());
  EXPECT_THAT(In("holds"), IsEmpty());
}

TEST_F(FullStoreTest, AnotherFailureIsOne) {
  const StepRecord record = Publish("s", 1);
  fs::create_directories(Below("deleted/a/s/0"));  // something that is not a record
  const Status removed = store_->Remove(record);
  EXPECT_FALSE(removed);
  EXPECT_THAT(In("steps/a/s"), ElementsAre("0"));
}

}  // namespace
}  // namespace ckptfs
