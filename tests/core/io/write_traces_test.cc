// SPDX-License-Identifier: Apache-2.0
#include "core/io/write_traces.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "core/base/descriptor.h"
#include "core/io/file_root.h"
#include "core/io/local_filesystem.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr uint64_t kSize = 1 << 20;
constexpr uint64_t kPart = 1 << 16;

struct WriteTracesTest : testing::Test {
  TemporaryDirectory directory;

  void SetUp() override {
    if (!IsLocalFilesystem(directory.path())) GTEST_SKIP() << "the filesystem may tell nothing";
  }
  Descriptor Make(int flags = O_RDWR) const {
    return *OpenDescriptor(path(), flags | O_CREAT | O_TRUNC, 0600);
  }
  void Put(const Descriptor& file, uint64_t offset, uint64_t length, char letter = 'x') const {
    const std::string bytes(length, letter);
    ASSERT_EQ(pwrite(file.get(), bytes.data(), length, static_cast<off_t>(offset)),
              static_cast<ssize_t>(length));
  }
  std::string path() const { return directory.path() + "/file"; }
  uint64_t NeverWritten() const { return BytesNeverWritten(**OpenLocalFile(path())); }
  bool IsOpen() const { return IsOpenForWriting(**OpenLocalFile(path())); }
};

TEST_F(WriteTracesTest, WhatWasWrittenHasNoTrace) {
  const Descriptor file = Make();
  EXPECT_EQ(NeverWritten(), 0u);
  Put(file, 0, kSize - 100);  // in memory only
  EXPECT_EQ(NeverWritten(), 0u);
  ASSERT_EQ(fsync(file.get()), 0);
  EXPECT_EQ(NeverWritten(), 0u);
  Put(file, 0, kSize, 0);  // zeros are bytes, too
  EXPECT_EQ(NeverWritten(), 0u);
}

TEST_F(WriteTracesTest, AFileThatHasItsSizeFirst) {
  const Descriptor file = Make();
  ASSERT_EQ(ftruncate(file.get(), kSize), 0);
  EXPECT_EQ(NeverWritten(), kSize);
  Put(file, 0, kPart);
  Put(file, kSize - kPart, kPart);
  EXPECT_EQ(NeverWritten(), kSize - 2 * kPart);
  Put(file, kPart, kSize - 2 * kPart);
  EXPECT_EQ(NeverWritten(), 0u);
}

TEST_F(WriteTracesTest, AFileWhoseSpaceIsAllocatedFirst) {
  const Descriptor file = Make();
  if (fallocate(file.get(), 0, 0, kSize) != 0) GTEST_SKIP() << "no fallocate here";
  EXPECT_EQ(NeverWritten(), kSize);
  Put(file, 0, kPart);
  ASSERT_EQ(fsync(file.get()), 0);
  // A reader fills pages with zeros, which are data for SEEK_HOLE.
  std::string read(kSize, 'x');
  ASSERT_EQ(pread(file.get(), read.data(), kSize, 0), static_cast<ssize_t>(kSize));
  EXPECT_EQ(NeverWritten(), kSize - kPart);
  Put(file, kPart, kSize - kPart);  // not written back yet
  EXPECT_EQ(NeverWritten(), 0u);
}

TEST_F(WriteTracesTest, SpaceBeyondTheEndIsNoTrace) {
  const Descriptor file = Make();
  if (fallocate(file.get(), FALLOC_FL_KEEP_SIZE, 0, 4 * kSize) != 0)
    GTEST_SKIP() << "no fallocate here";
  Put(file, 0, kSize);
  EXPECT_EQ(NeverWritten(), 0u);
  ASSERT_EQ(fsync(file.get()), 0);
  EXPECT_EQ(NeverWritten(), 0u);
}

TEST_F(WriteTracesTest, AWriterIsSeenUntilItCloses) {
  for (const int flags : {O_WRONLY, O_RDWR, O_WRONLY | O_APPEND}) {
    Descriptor file = Make(flags);
    EXPECT_TRUE(IsOpen());
    file = Descriptor();
    EXPECT_FALSE(IsOpen());
  }
  Descriptor file = Make();
  ASSERT_EQ(ftruncate(file.get(), kPart), 0);
  void* const mapped = mmap(nullptr, kPart, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  file = Descriptor();
  EXPECT_TRUE(IsOpen());
  munmap(mapped, kPart);
  EXPECT_FALSE(IsOpen());
}

// A writer that comes while nobody looks meets nothing of ours.
TEST_F(WriteTracesTest, NothingIsHeldAfterALook) {
  Make();
  const auto looked = *OpenLocalFile(path());
  EXPECT_FALSE(IsOpenForWriting(*looked));
  const auto writer = OpenDescriptor(path(), O_WRONLY | O_NONBLOCK);
  EXPECT_TRUE(writer) << "a lease would be EWOULDBLOCK";
  EXPECT_TRUE(IsOpenForWriting(*looked));
}

}  // namespace
}  // namespace ckptfs
