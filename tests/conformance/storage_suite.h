// SPDX-License-Identifier: Apache-2.0
//
// StorageSuite is what every Root and every Storage must do.  An implementation
// registers:
//
//   INSTANTIATE_TYPED_TEST_SUITE_P(Memory, StorageSuite, MemoryFixture);
//
// where the fixture type has `Storage& storage()`, empty at first, and
// `const Root& root()`, by which what was written is read: the storage itself, or
// another Root over the same files.

#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "core/io/root.h"
#include "tests/support/storage_text.h"

namespace ckptfs {

template <class Fixture>
class StorageSuite : public testing::Test {
 protected:
  Storage& storage() { return fixture_.storage(); }
  const Root& root() { return fixture_.root(); }
  void Write(std::string_view path, std::string_view text) {
    auto writer = this->storage().Create(path);
    ASSERT_TRUE(writer) << writer.error().message;
    const size_t half = text.size() / 2;
    ASSERT_TRUE((*writer)->WriteAt(half, BytesOf(text.substr(half))));  // in any order
    ASSERT_TRUE((*writer)->WriteAt(0, BytesOf(text.substr(0, half))));
    ASSERT_TRUE((*writer)->Close());
  }

 private:
  Fixture fixture_;
};

TYPED_TEST_SUITE_P(StorageSuite);

TYPED_TEST_P(StorageSuite, WrittenIsRead) {
  this->Write("a/b/object", "hello world");
  const Root& root = this->root();
  EXPECT_EQ(ReadObject(root, "a/b/object"), "hello world");
  EXPECT_EQ(ReadObject(root, "a/b/object", 6, 3), "wor");
  EXPECT_EQ(ReadObject(root, "a/b/object", 11, 0), "");
  const std::string lost(ErrorCodeName(ErrorCode::kDataLoss));
  for (const uint64_t at : {uint64_t{9}, uint64_t{1000}, ~uint64_t{0}}) {
    EXPECT_EQ(ReadObject(root, "a/b/object", at, 3), lost);
  }
  EXPECT_EQ(root.Stat("a/b/object")->stamp.size, 11u);
  EXPECT_EQ(ReadObject(root, "a/b"), ErrorCodeName(ErrorCode::kInvalid)) << "a directory";
  EXPECT_EQ(ReadObject(root, "a/c"), ErrorCodeName(ErrorCode::kNotFound));
}

TYPED_TEST_P(StorageSuite, ManyRangesInOneCall) {
  std::string text(100'000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  this->Write("x", text);
  const auto file = *this->root().Open("x");
  std::vector<std::string> parts(100, std::string(700, '?'));
  std::vector<ReadRequest> requests;
  for (size_t i = parts.size(); i-- > 0;) {  // not sorted, and they overlap
    requests.push_back({i * 990, std::as_writable_bytes(std::span(parts[i]))});
  }
  requests.push_back({5, {}});
  ASSERT_TRUE(file->ReadAt(requests));
  for (size_t i = 0; i < parts.size(); ++i) EXPECT_EQ(parts[i], text.substr(i * 990, 700)) << i;
  ASSERT_TRUE(file->ReadAt(std::span<const ReadRequest>()));
  requests.push_back({text.size() - 1, std::as_writable_bytes(std::span(parts[0]))});
  EXPECT_EQ(CodeOf(file->ReadAt(requests)), ErrorCode::kDataLoss);
}

TYPED_TEST_P(StorageSuite, AMappingHasTheFilesBytesAndOutlivesIt) {
  this->Write("x", "some bytes");
  this->Write("empty", "");
  std::shared_ptr<const Mapping> mapping;
  {
    const auto file = *this->root().Open("x");
    mapping = *file->Map();
    EXPECT_TRUE(mapping || !this->root().local());
    const auto none = *(*this->root().Open("empty"))->Map();
    EXPECT_TRUE(!none || none->bytes().empty());
  }
  ASSERT_TRUE(this->storage().Remove("x"));
  if (!mapping) return;
  EXPECT_EQ(
      std::string(reinterpret_cast<const char*>(mapping->bytes().data()), mapping->bytes().size()),
      "some bytes");
}

TYPED_TEST_P(StorageSuite, AFileIsWhatItWasWhenItWasOpened) {
  this->Write("x", "old");
  const auto old = *this->root().Open("x");
  const FileIdentity before = *old->Identity();
  EXPECT_EQ(before.stamp.size, 3u);
  EXPECT_EQ(before.stamp.inode, this->root().Stat("x")->stamp.inode);
  EXPECT_EQ(before.access.mode & 077, 0u) << "for the owner only";
  this->Write("x", "other");
  EXPECT_EQ(*old->Read(0, 3, "it"), "old");
  const FileIdentity after = *(*this->root().Open("x"))->Identity();
  EXPECT_NE(before.stamp, after.stamp);
  EXPECT_EQ(old->Read(1, 3, "the tail").error().code, ErrorCode::kInvalid);
}

TYPED_TEST_P(StorageSuite, EmptyObjects) {
  this->Write("empty", "");
  EXPECT_EQ(this->root().Stat("empty")->stamp.size, 0u);
  ASSERT_TRUE(this->storage().PublishIfAbsent("empty2", {}));
  EXPECT_EQ(ReadObject(this->root(), "empty2"), "");
}

TYPED_TEST_P(StorageSuite, NothingUnderTheNameBeforeClose) {
  auto writer = this->storage().Create("x");
  ASSERT_TRUE(writer);
  ASSERT_TRUE((*writer)->WriteAt(0, BytesOf("half")));
  EXPECT_EQ(this->root().Stat("x").error().code, ErrorCode::kNotFound);
  writer->reset();
  EXPECT_EQ(this->root().Stat("x").error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(ListFilesBelow(this->storage(), "")->empty());
}

TYPED_TEST_P(StorageSuite, PartsFromManyThreads) {
  auto writer = *this->storage().Create("parts");
  ASSERT_TRUE(writer->Reserve(8000));  // none of it is seen before Close
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&writer, t] {
      const std::string part(1000, static_cast<char>('0' + t));
      EXPECT_TRUE(writer->WriteAt(t * part.size(), BytesOf(part)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(writer->Close());
  std::string expected;
  for (char digit = '0'; digit < '8'; ++digit) expected += std::string(1000, digit);
  EXPECT_EQ(ReadObject(this->root(), "parts"), expected);
}

TYPED_TEST_P(StorageSuite, CreateReplacesWhenClosed) {
  this->Write("x", "old");
  auto writer = this->storage().Create("x");
  ASSERT_TRUE((*writer)->WriteAt(0, BytesOf("newer")));
  EXPECT_EQ(ReadObject(this->root(), "x"), "old");
  ASSERT_TRUE((*writer)->Close());
  EXPECT_EQ(ReadObject(this->root(), "x"), "newer");
}

TYPED_TEST_P(StorageSuite, PublishNeverReplaces) {
  Storage& storage = this->storage();
  ASSERT_TRUE(storage.PublishIfAbsent("steps/run/1", BytesOf("first")));
  EXPECT_EQ(CodeOf(storage.PublishIfAbsent("steps/run/1", BytesOf("second"))), ErrorCode::kExists);
  EXPECT_EQ(ReadObject(this->root(), "steps/run/1"), "first");
}

TYPED_TEST_P(StorageSuite, OneWinnerOfManyPublishers) {
  Storage& storage = this->storage();
  for (int round = 0; round < 10; ++round) {
    const std::string name = StrCat("race/", round);
    std::atomic<int> winners{0}, losers{0};
    std::atomic<int> winner{-1};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&, t] {
        const Status done = storage.PublishIfAbsent(name, BytesOf(std::to_string(t)));
        if (done) winner = t;
        if (done) ++winners;
        if (!done && done.error().code == ErrorCode::kExists) ++losers;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
    EXPECT_EQ(losers, 7);
    EXPECT_EQ(ReadObject(this->root(), name), std::to_string(winner.load()));
  }
}

TYPED_TEST_P(StorageSuite, ListsOneDirectorySorted) {
  for (const char* name : {"steps/b", "steps/a/2", "steps/a/1", "steps-old/x", "steps/a.b"}) {
    this->Write(name, name);
  }
  const auto text = [this](std::string_view path) {
    const auto entries = this->root().List(path);
    if (!entries) return std::string(ErrorCodeName(entries.error().code));
    std::string all;
    for (const RootEntry& entry : *entries) {
      if (entry.name.front() == '.') continue;  // .tmp, through a FileRoot
      all += StrCat(entry.name, entry.kind == EntryKind::kDirectory ? "/ " : " ");
    }
    return all;
  };
  EXPECT_EQ(text(""), "steps/ steps-old/ ");
  EXPECT_EQ(text("steps"), "a/ a.b b ");
  EXPECT_EQ(text("steps/a"), "1 2 ");
  EXPECT_EQ(text("nothing"), ErrorCodeName(ErrorCode::kNotFound));
  EXPECT_EQ(this->root().Stat("steps/a")->kind, EntryKind::kDirectory);
  EXPECT_EQ(this->root().Stat("")->kind, EntryKind::kDirectory);
  EXPECT_EQ(this->root().Stat("step").error().code, ErrorCode::kNotFound);
}

TYPED_TEST_P(StorageSuite, ListsFilesBelowAFolderSorted) {
  for (const char* name : {"steps/b", "steps/a/2", "steps/a/1", "stepsister", "other/x"}) {
    this->Write(name, name);
  }
  using Names = std::vector<std::string>;
  const Storage& storage = this->storage();
  EXPECT_EQ(*ListFilesBelow(storage, "steps"), (Names{"steps/a/1", "steps/a/2", "steps/b"}));
  EXPECT_EQ(*ListFilesBelow(storage, "steps/a/"), (Names{"steps/a/1", "steps/a/2"}));
  EXPECT_EQ(*ListFilesBelow(storage, "nothing"), Names{});
  EXPECT_EQ(ListFilesBelow(storage, "")->size(), 5u);
}

TYPED_TEST_P(StorageSuite, RemovedIsGone) {
  this->Write("x", "1");
  const auto open = *this->root().Open("x");
  ASSERT_TRUE(this->storage().Remove("x"));
  EXPECT_EQ(*open->Read(0, 1, "it"), "1");
  EXPECT_EQ(this->root().Stat("x").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(CodeOf(this->storage().Remove("x")), ErrorCode::kNotFound);
  ASSERT_TRUE(this->storage().PublishIfAbsent("x", BytesOf("again")));
}

TYPED_TEST_P(StorageSuite, NamesCannotEscape) {
  Storage& storage = this->storage();
  for (const char* name : {"", "/", "/etc/passwd", "a//b", "a/", "..", "a/../../b", ".", "./a"}) {
    EXPECT_FALSE(storage.Create(name)) << name;
    EXPECT_FALSE(storage.PublishIfAbsent(name, BytesOf("x"))) << name;
    EXPECT_FALSE(storage.Remove(name)) << name;
    EXPECT_EQ(ReadObject(this->root(), name), ErrorCodeName(ErrorCode::kInvalid)) << name;
    if (*name == '\0') continue;
    EXPECT_EQ(this->root().Stat(name).error().code, ErrorCode::kInvalid) << name;
    EXPECT_EQ(this->root().List(name).error().code, ErrorCode::kInvalid) << name;
  }
  EXPECT_FALSE(storage.Create(std::string_view("a\0b", 3)));
}

REGISTER_TYPED_TEST_SUITE_P(StorageSuite, WrittenIsRead, ManyRangesInOneCall,
                            AMappingHasTheFilesBytesAndOutlivesIt, AFileIsWhatItWasWhenItWasOpened,
                            EmptyObjects, NothingUnderTheNameBeforeClose, PartsFromManyThreads,
                            CreateReplacesWhenClosed, PublishNeverReplaces,
                            OneWinnerOfManyPublishers, ListsOneDirectorySorted,
                            ListsFilesBelowAFolderSorted, RemovedIsGone, NamesCannotEscape);

}  // namespace ckptfs
