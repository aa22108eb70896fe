// SPDX-License-Identifier: Apache-2.0

#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "core/io/file_root.h"
#include "core/io/file_storage.h"
#include "core/io/memory_root.h"
#include "tests/conformance/storage_suite.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/slow_root.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

class FileFixture {
 public:
  FileFixture() : storage_(*FileStorage::Open(directory_.path() + "/deep/store", true)) {}
  Storage& storage() { return *storage_; }
  const Root& root() { return *storage_; }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<FileStorage> storage_;
};

// Written as a storage, read as a source directory is.
class FileRootFixture {
 public:
  FileRootFixture()
      : storage_(*FileStorage::Open(directory_.path(), true)), root_(storage_->directory()) {}
  Storage& storage() { return *storage_; }
  const Root& root() { return root_; }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<FileStorage> storage_;
  FileRoot root_;
};

class MemoryFixture {
 public:
  Storage& storage() { return storage_; }
  const Root& root() { return storage_; }

 private:
  MemoryRoot storage_{"memory"};
};

class FaultyFixture {
 public:
  Storage& storage() { return storage_; }
  const Root& root() { return storage_; }

 private:
  FaultyStorage storage_;
};

class SlowFixture {
 public:
  Storage& storage() { return *storage_; }
  const Root& root() { return root_; }

 private:
  std::shared_ptr<MemoryRoot> storage_ = std::make_shared<MemoryRoot>("far");
  SlowRoot root_{storage_, {std::chrono::microseconds(100), 1e9}};
};

using Fixtures =
    testing::Types<FileFixture, FileRootFixture, MemoryFixture, FaultyFixture, SlowFixture>;
INSTANTIATE_TYPED_TEST_SUITE_P(Storages, StorageSuite, Fixtures);

// Parts that go past the page cache, and others between them.
TEST(FileStorage, LargePartsInWholePages) {
  constexpr size_t kPart = size_t{2} << 20;
  constexpr size_t kSize = 2 * kPart + 4096 + 5;
  const std::unique_ptr<char, decltype(&free)> memory(
      static_cast<char*>(aligned_alloc(4096, 2 * kPart + 8192)), &free);
  for (size_t i = 0; i < kSize; ++i) memory.get()[i] = static_cast<char>(i * 31 + i / 4093);
  const auto bytes = std::as_bytes(std::span<const char>(memory.get(), kSize));
  FileFixture fixture;
  const auto writer = *fixture.storage().Create("large");
  EXPECT_TRUE(writer->Reserve(kSize));
  EXPECT_EQ(CodeOf((*fixture.storage().Create("too large"))->Reserve(uint64_t{1} << 42)),
            ErrorCode::kExhausted);
  std::thread other([&] { EXPECT_TRUE(writer->WriteAt(kPart, bytes.subspan(kPart))); });
  EXPECT_TRUE(writer->WriteAt(0, bytes.first(100)));
  EXPECT_TRUE(writer->WriteAt(100, bytes.subspan(100, 3996)));
  EXPECT_TRUE(writer->WriteAt(4096, bytes.subspan(4096, kPart - 4096)));
  other.join();
  ASSERT_TRUE(writer->Close());
  const auto found = ReadWhole(fixture.root(), "large", 2 * kSize);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_TRUE(*found == std::string_view(memory.get(), kSize));
}

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

// Their times do not matter: they come from clocks of other nodes.
TEST(FileStorage, LeftoversAreRemovedWhatIsBeingWrittenIsNot) {
  const TemporaryDirectory directory;
  const auto writing = *FileStorage::Open(directory.path(), true);
  const auto writer = *writing->Create("x");
  const std::string young = directory.Write(".tmp/young", "x");
  const struct timeval long_ago[2] = {{1000, 0}, {1000, 0}};
  for (const auto& entry : std::filesystem::directory_iterator(directory.path() + "/.tmp")) {
    if (entry.path() != young) {
      ASSERT_EQ(utimes(entry.path().c_str(), long_ago), 0);
    }
  }
  const auto storage = *FileStorage::Open(directory.path(), true);
  EXPECT_NE(access(young.c_str(), F_OK), 0);
  EXPECT_TRUE(ListFilesBelow(*storage, "")->empty());
  EXPECT_TRUE(writer->Close());
  EXPECT_EQ(ReadObject(*storage, "x"), "");
}

TEST(FileStorage, TwoStoragesOnOneDirectoryHaveOneWinner) {
  const TemporaryDirectory directory;
  const auto a = *FileStorage::Open(directory.path(), true);
  const auto b = *FileStorage::Open(directory.path(), true);
  EXPECT_TRUE(a->PublishIfAbsent("x", BytesOf("a")));
  EXPECT_EQ(b->PublishIfAbsent("x", BytesOf("b")).error().code, ErrorCode::kExists);
  EXPECT_EQ(ReadObject(*b, "x"), "a");
}

TEST(FileStorage, LostPublisherLeavesNoTemporaryFile) {
  const TemporaryDirectory directory;
  const auto storage = *FileStorage::Open(directory.path(), true);
  EXPECT_TRUE(storage->PublishIfAbsent("x", BytesOf("a")));
  EXPECT_FALSE(storage->PublishIfAbsent("x", BytesOf("b")));
  EXPECT_TRUE(std::filesystem::is_empty(directory.path() + "/.tmp"));
}

TEST(FileRoot, WhatIsNotAFileIsRefusedAndDoesNotHang) {
  const TemporaryDirectory directory;
  ASSERT_EQ(mkfifo((directory.path() + "/fifo").c_str(), 0600), 0);
  const FileRoot root(directory.path());
  EXPECT_EQ(ReadObject(root, "fifo"), ErrorCodeName(ErrorCode::kInvalid));
  EXPECT_EQ(root.Stat("fifo")->kind, EntryKind::kOther);
  EXPECT_EQ(root.List("")->front().kind, EntryKind::kOther);
}

TEST(FileRoot, AFileThatShrinksIsDataLoss) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("x", std::string(10'000, 'x'));
  const FileRoot root(directory.path());
  const auto file = *root.Open("x");
  ASSERT_EQ(truncate(path.c_str(), 5000), 0);
  std::string out(8000, '?');
  const Status read = file->ReadAt(0, std::as_writable_bytes(std::span(out)));
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kDataLoss);
  EXPECT_NE(read.error().message.find(path), std::string::npos);
}

// A rope is read across its spans, and keeps its owner.
TEST(MemoryRoot, RopesOfManySpans) {
  auto words = std::make_shared<std::vector<std::string>>(
      std::vector<std::string>{"one", "", "two", "three"});
  const std::weak_ptr<void> alive = words;
  std::vector<std::span<const std::byte>> rope;
  for (const std::string& word : *words) rope.push_back(BytesOf(word));
  MemoryRoot root("memory");
  ASSERT_TRUE(root.Add("words", rope, std::move(words), OwnerAndMode{0640, 7, 8, false}));
  EXPECT_EQ(ReadObject(root, "words"), "onetwothree");
  auto file = *root.Open("words");
  for (size_t begin = 0; begin <= 11; ++begin) {
    for (size_t end = begin; end <= 11; ++end) {
      EXPECT_EQ(ReadObject(root, "words", begin, end - begin),
                std::string("onetwothree").substr(begin, end - begin));
    }
  }
  EXPECT_EQ(*file->Map(), nullptr);
  EXPECT_EQ(file->Identity()->access, (OwnerAndMode{0640, 7, 8, false}));
  EXPECT_EQ(root.Add("words", {}, nullptr, {}).error().code, ErrorCode::kExists);
  ASSERT_TRUE(root.Remove("words"));
  EXPECT_FALSE(alive.expired());
  file.reset();
  EXPECT_TRUE(alive.expired());
}

TEST(FaultyStorage, FailsAtTheCallItWasToldTo) {
  FaultyStorage storage;
  storage.FailAt(2, ErrorCode::kExhausted);
  auto writer = storage.Create("x");
  ASSERT_TRUE(writer);
  EXPECT_EQ((*writer)->WriteAt(0, BytesOf("1")).error().code, ErrorCode::kExhausted);
  EXPECT_TRUE((*writer)->WriteAt(0, BytesOf("2")));
}

TEST(FaultyStorage, ACrashForgetsWhatWasNotClosed) {
  FaultyStorage storage;
  auto writer = storage.Create("x");
  ASSERT_TRUE((*writer)->WriteAt(0, BytesOf("1")));
  storage.Crash();
  EXPECT_FALSE((*writer)->Close());
  EXPECT_EQ(storage.Stat("x").error().code, ErrorCode::kNotFound);
}

TEST(FaultyStorage, AMachineThatStopsActsOnceMoreOrNot) {
  for (const bool with_effect : {false, true}) {
    const auto memory = std::make_shared<MemoryRoot>("memory");
    FaultyStorage storage(memory);
    storage.StopAt(2, with_effect);
    EXPECT_TRUE(storage.PublishIfAbsent("a", {}));
    EXPECT_FALSE(storage.PublishIfAbsent("b", {}));
    EXPECT_TRUE(storage.stopped());
    EXPECT_FALSE(storage.PublishIfAbsent("c", {}));
    EXPECT_FALSE(storage.Stat("a"));
    EXPECT_EQ(ListFilesBelow(*memory, "")->size(), with_effect ? 2u : 1u);
  }
}

}  // namespace
}  // namespace ckptfs
