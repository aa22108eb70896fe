// SPDX-License-Identifier: Apache-2.0
//
// The operating system may fail a writer: an error at any call, fewer bytes than were asked for.
// Then an object is whole under its name, and durable when that is said, or there is an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/strings.h"
#include "core/io/file_storage.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/watched_io.h"

namespace ckptfs {
namespace {

constexpr uint64_t kLarge = uint64_t{2} << 20;  // goes past the page cache
constexpr uint64_t kAll = kLarge + 4096 + 5;
constexpr std::string_view kName = "some/folder/object";

class FileStorageFaultsTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    storage_ = *FileStorage::Open(directory_.path() + "/store", true);
    for (size_t i = 0; i < kAll; ++i) memory_.get()[i] = static_cast<char>(i * 31 + i / 4093);
  }
  std::string_view text() const { return {memory_.get(), kAll}; }
  // In two parts and closed, or published at once.
  Status Write() {
    const auto bytes = std::as_bytes(std::span<const char>(memory_.get(), kAll));
    if (GetParam()) return storage_->PublishIfAbsent(kName, bytes);
    CKPT_ASSIGN_OR_RETURN(const auto writer, storage_->Create(kName));
    CKPT_RETURN_IF_ERROR(writer->WriteAt(0, bytes.first(kLarge)));
    CKPT_RETURN_IF_ERROR(writer->WriteAt(kLarge, bytes.subspan(kLarge)));
    return writer->Close();
  }
  bool IsThere() const { return storage_->Stat(kName).has_value(); }
  bool IsWhole() const {
    const auto found = ReadWhole(*storage_, kName, 2 * kAll);
    return found && *found == text();
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<FileStorage> storage_;
  const std::unique_ptr<char, decltype(&free)> memory_{
      static_cast<char*>(aligned_alloc(4096, kLarge + 8192)), &free};
};

// The place of the last call of that name on a path that ends so.
ptrdiff_t LastOf(const std::vector<SystemCall>& calls, std::string_view name,
                 std::string_view path) {
  const auto found = std::find_if(calls.rbegin(), calls.rend(), [&](const SystemCall& call) {
    return call.name == name && call.path.ends_with(path);
  });
  return calls.rend() - found - 1;
}

TEST_P(FileStorageFaultsTest, ItIsOnTheDiskBeforeItHasItsNameAndTheNameBeforeThatIsSaid) {
  const WatchedIo watch;
  ASSERT_TRUE(Write());
  const auto calls = watch.calls();
  const auto written = std::find_if(calls.rbegin(), calls.rend(),
                                    [](const SystemCall& call) { return call.name == "pwrite"; });
  ASSERT_NE(written, calls.rend());
  const ptrdiff_t write = calls.rend() - written - 1;
  const ptrdiff_t sync = LastOf(calls, "fsync", written->path);
  const ptrdiff_t name = LastOf(calls, GetParam() ? "link" : "rename", kName);
  EXPECT_LT(write, sync);
  EXPECT_LT(sync, name);
  EXPECT_LT(name, LastOf(calls, "fsync", "/some/folder"));
  EXPECT_LT(LastOf(calls, "mkdir", "/some/folder"), LastOf(calls, "fsync", "/some"));
  EXPECT_LT(LastOf(calls, "mkdir", "/some"), LastOf(calls, "fsync", "/store"));
}

TEST_P(FileStorageFaultsTest, WhateverCallFailsItIsWholeOrNotThere) {
  uint64_t errors = 0;
  for (uint64_t n = 1;; ++n) {
    std::optional<SystemCall> failed;
    Status done;
    {
      const WatchedIo watch(n);
      done = Write();
      failed = watch.failed();
    }
    SCOPED_TRACE(failed ? failed->name + " " + failed->path : "nothing failed");
    if (IsThere()) {
      EXPECT_TRUE(IsWhole());
    }
    if (done) {
      ASSERT_TRUE(IsWhole());
    } else {
      EXPECT_EQ(done.error().code, ErrorCode::kIo);
      EXPECT_THAT(done.error().message, testing::HasSubstr(directory_.path()));
    }
    if (!failed) break;
    if (failed->name == "fsync" || failed->name == "rename") {
      EXPECT_FALSE(done);
    }
    errors += done ? 0 : 1;
    EXPECT_TRUE(std::filesystem::is_empty(directory_.path() + "/store/.tmp"));
    std::filesystem::remove_all(directory_.path() + "/store/some");
  }
  EXPECT_GT(errors, 5u);
}

TEST_P(FileStorageFaultsTest, AShortWriteGoesOnWhereItEnded) {
  for (const uint64_t most : {uint64_t{100'003}, uint64_t{1} << 20, kLarge - 1}) {
    std::filesystem::remove_all(directory_.path() + "/store/some");
    WatchedIo watch;
    watch.WriteAtMost(most);
    ASSERT_TRUE(Write());
    EXPECT_TRUE(IsWhole()) << most;
  }
  std::filesystem::remove_all(directory_.path() + "/store/some");
  WatchedIo watch;
  watch.WriteAtMost(0);
  const Status done = Write();
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code, ErrorCode::kIo);
  EXPECT_FALSE(IsThere());
}

INSTANTIATE_TEST_SUITE_P(Ways, FileStorageFaultsTest, testing::Bool(),
                         [](const auto& way) { return way.param ? "Published" : "Written"; });

}  // namespace
}  // namespace ckptfs
