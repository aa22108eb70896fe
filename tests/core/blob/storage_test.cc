// SPDX-License-Identifier: Apache-2.0

#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "core/blob/file_storage.h"
#include "tests/conformance/storage_suite.h"
#include "tests/support/memory_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

class FileFixture {
 public:
  FileFixture() : storage_(*FileStorage::Open(directory_.path() + "/deep/store", true)) {}
  Storage& storage() { return *storage_; }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<FileStorage> storage_;
};

class MemoryFixture {
 public:
  Storage& storage() { return storage_; }

 private:
  MemoryStorage storage_;
};

using Fixtures = testing::Types<FileFixture, MemoryFixture>;
INSTANTIATE_TYPED_TEST_SUITE_P(Storages, StorageSuite, Fixtures);

TEST(FileStorage, OpenWithoutCreateNeedsTheDirectory) {
  const TemporaryDirectory directory;
  const auto missing = FileStorage::Open(directory.path() + "/none", false);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  const std::string file = directory.Write("file", "x");
  EXPECT_FALSE(FileStorage::Open(file, true));
}

TEST(FileStorage, DirectoriesAreForTheOwnerOnly) {
  const TemporaryDirectory directory;
  const auto storage = *FileStorage::Open(directory.path() + "/store", true);
  ASSERT_TRUE(storage->PublishIfAbsent("a/b", BytesOf("x")));
  for (const char* name : {"/store", "/store/a"}) {
    struct stat status;
    ASSERT_EQ(stat((directory.path() + name).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700u) << name;
  }
}

TEST(FileStorage, OldLeftoversAreRemovedYoungOnesKept) {
  const TemporaryDirectory directory;
  ASSERT_TRUE(FileStorage::Open(directory.path(), true));
  const std::string old = directory.Write(".tmp/old", "x");
  const std::string young = directory.Write(".tmp/young", "x");
  const struct timeval long_ago[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(utimes(old.c_str(), long_ago), 0);
  const auto storage = *FileStorage::Open(directory.path(), true);
  EXPECT_NE(access(old.c_str(), F_OK), 0);
  EXPECT_EQ(access(young.c_str(), F_OK), 0);
  EXPECT_TRUE(storage->List("")->empty());
}

TEST(FileStorage, TwoStoragesOnOneDirectoryHaveOneWinner) {
  const TemporaryDirectory directory;
  const auto a = *FileStorage::Open(directory.path(), true);
  const auto b = *FileStorage::Open(directory.path(), true);
  EXPECT_TRUE(a->PublishIfAbsent("x", BytesOf("a")));
  EXPECT_EQ(b->PublishIfAbsent("x", BytesOf("b")).error().code, ErrorCode::kExists);
  EXPECT_EQ(ReadObject(*b, "x", 0, 9), "a");
}

TEST(FileStorage, LostPublisherLeavesNoTemporaryFile) {
  const TemporaryDirectory directory;
  const auto storage = *FileStorage::Open(directory.path(), true);
  EXPECT_TRUE(storage->PublishIfAbsent("x", BytesOf("a")));
  EXPECT_FALSE(storage->PublishIfAbsent("x", BytesOf("b")));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/.tmp"));
}

TEST(MemoryStorage, FailsAtTheCallItWasToldTo) {
  MemoryStorage storage;
  storage.FailAt(2, ErrorCode::kExhausted);
  auto writer = storage.Create("x");
  ASSERT_TRUE(writer);
  EXPECT_EQ((*writer)->Append(BytesOf("1")).error().code, ErrorCode::kExhausted);
  EXPECT_TRUE((*writer)->Append(BytesOf("2")));
}

TEST(MemoryStorage, ACrashForgetsWhatWasNotClosed) {
  MemoryStorage storage;
  auto writer = storage.Create("x");
  ASSERT_TRUE((*writer)->Append(BytesOf("1")));
  storage.Crash();
  EXPECT_FALSE((*writer)->Close());
  EXPECT_EQ(storage.Stat("x").error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace ckptfs
