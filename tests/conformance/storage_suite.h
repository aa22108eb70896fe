// SPDX-License-Identifier: Apache-2.0
//
// StorageSuite is what every Storage must do.  An implementation registers:
//
//   INSTANTIATE_TYPED_TEST_SUITE_P(Memory, StorageSuite, MemoryFixture);
//
// where the fixture type has `Storage& storage()` giving an empty storage.

#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "core/base/strings.h"
#include "core/blob/storage.h"

namespace ckptfs {

inline std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

inline std::string ReadObject(Storage& storage, std::string_view name, uint64_t offset,
                              size_t length) {
  std::string out(length, '?');
  const auto read = storage.ReadAt(name, offset, std::as_writable_bytes(std::span(out)));
  if (!read) return std::string(ErrorCodeName(read.error().code));
  out.resize(*read);
  return out;
}

template <class Fixture>
class StorageSuite : public testing::Test {
 protected:
  Storage& storage() { return fixture_.storage(); }
  void Write(std::string_view name, std::string_view text) {
    auto writer = this->storage().Create(name);
    ASSERT_TRUE(writer) << writer.error().message;
    ASSERT_TRUE((*writer)->Append(BytesOf(text.substr(0, text.size() / 2))));
    ASSERT_TRUE((*writer)->Append(BytesOf(text.substr(text.size() / 2))));
    ASSERT_TRUE((*writer)->Close());
  }
  ErrorCode CodeOf(const Status& status) {
    return status ? ErrorCode::kInternal : status.error().code;
  }

 private:
  Fixture fixture_;
};

TYPED_TEST_SUITE_P(StorageSuite);

TYPED_TEST_P(StorageSuite, WrittenIsRead) {
  this->Write("a/b/object", "hello world");
  Storage& storage = this->storage();
  EXPECT_EQ(ReadObject(storage, "a/b/object", 0, 100), "hello world");
  EXPECT_EQ(ReadObject(storage, "a/b/object", 6, 3), "wor");
  EXPECT_EQ(ReadObject(storage, "a/b/object", 11, 3), "");
  EXPECT_EQ(ReadObject(storage, "a/b/object", 1000, 3), "");
  EXPECT_EQ(storage.Stat("a/b/object")->size, 11u);
}

TYPED_TEST_P(StorageSuite, EmptyObjects) {
  this->Write("empty", "");
  EXPECT_EQ(this->storage().Stat("empty")->size, 0u);
  ASSERT_TRUE(this->storage().PublishIfAbsent("empty2", {}));
  EXPECT_EQ(ReadObject(this->storage(), "empty2", 0, 5), "");
}

TYPED_TEST_P(StorageSuite, NothingUnderTheNameBeforeClose) {
  Storage& storage = this->storage();
  auto writer = storage.Create("x");
  ASSERT_TRUE(writer);
  ASSERT_TRUE((*writer)->Append(BytesOf("half")));
  EXPECT_EQ(storage.Stat("x").error().code, ErrorCode::kNotFound);
  writer->reset();
  EXPECT_EQ(storage.Stat("x").error().code, ErrorCode::kNotFound);
  EXPECT_TRUE(storage.List("")->empty());
}

TYPED_TEST_P(StorageSuite, CreateReplacesWhenClosed) {
  this->Write("x", "old");
  auto writer = this->storage().Create("x");
  ASSERT_TRUE((*writer)->Append(BytesOf("newer")));
  EXPECT_EQ(ReadObject(this->storage(), "x", 0, 10), "old");
  ASSERT_TRUE((*writer)->Close());
  EXPECT_EQ(ReadObject(this->storage(), "x", 0, 10), "newer");
}

TYPED_TEST_P(StorageSuite, PublishNeverReplaces) {
  Storage& storage = this->storage();
  ASSERT_TRUE(storage.PublishIfAbsent("steps/run/1", BytesOf("first")));
  EXPECT_EQ(this->CodeOf(storage.PublishIfAbsent("steps/run/1", BytesOf("second"))),
            ErrorCode::kExists);
  EXPECT_EQ(ReadObject(storage, "steps/run/1", 0, 10), "first");
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
    EXPECT_EQ(ReadObject(storage, name, 0, 10), std::to_string(winner.load()));
  }
}

TYPED_TEST_P(StorageSuite, ListsBelowAFolderSorted) {
  for (const char* name : {"steps/b", "steps/a/2", "steps/a/1", "stepsister", "other/x"}) {
    this->Write(name, name);
  }
  using Names = std::vector<std::string>;
  EXPECT_EQ(*this->storage().List("steps"), (Names{"steps/a/1", "steps/a/2", "steps/b"}));
  EXPECT_EQ(*this->storage().List("steps/a/"), (Names{"steps/a/1", "steps/a/2"}));
  EXPECT_EQ(*this->storage().List("nothing"), Names{});
  EXPECT_EQ(this->storage().List("")->size(), 5u);
}

TYPED_TEST_P(StorageSuite, RemovedIsGone) {
  this->Write("x", "1");
  ASSERT_TRUE(this->storage().Remove("x"));
  EXPECT_EQ(this->storage().Stat("x").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(this->CodeOf(this->storage().Remove("x")), ErrorCode::kNotFound);
  ASSERT_TRUE(this->storage().PublishIfAbsent("x", BytesOf("again")));
}

TYPED_TEST_P(StorageSuite, NamesCannotEscape) {
  Storage& storage = this->storage();
  for (const char* name : {"", "/", "/etc/passwd", "a//b", "a/", "..", "a/../../b", ".", "./a"}) {
    EXPECT_FALSE(storage.Create(name)) << name;
    EXPECT_FALSE(storage.Stat(name)) << name;
    EXPECT_FALSE(storage.PublishIfAbsent(name, BytesOf("x"))) << name;
    EXPECT_FALSE(storage.Remove(name)) << name;
    EXPECT_EQ(ReadObject(storage, name, 0, 1), ErrorCodeName(ErrorCode::kInvalid)) << name;
  }
  EXPECT_FALSE(storage.Create(std::string_view("a\0b", 3)));
}

REGISTER_TYPED_TEST_SUITE_P(StorageSuite, WrittenIsRead, EmptyObjects,
                            NothingUnderTheNameBeforeClose, CreateReplacesWhenClosed,
                            PublishNeverReplaces, OneWinnerOfManyPublishers,
                            ListsBelowAFolderSorted, RemovedIsGone, NamesCannotEscape);

}  // namespace ckptfs
