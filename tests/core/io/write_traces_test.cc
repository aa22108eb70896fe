// SPDX-License-Identifier: Apache-2.0
#include "core/io/write_traces.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

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

// ---- Files of two saves -----------------------------------------------------------

constexpr int64_t kSealed = 1'000'000;  // milliseconds, as all times here

// Times in milliseconds; born 0: nobody tells.
StepFile Weights(int64_t born, int64_t written, uint64_t size = 1 << 20) {
  return {{born * 1'000'000, written * 1'000'000, written * 1'000'000}, size, true, true};
}
StepFile Other(int64_t born, int64_t written) {
  StepFile out = Weights(born, written);
  out.saved = out.read = false;
  return out;
}
std::vector<size_t> Anew(const std::vector<StepFile>& files) {
  return FindWrittenAnew(files, kSealed * 1'000'000);
}
using Positions = std::vector<size_t>;

TEST(FindWrittenAnewTest, FilesOfOneSave) {
  const StepFile weights = Weights(kSealed - 5000, kSealed - 4000);
  EXPECT_EQ(Anew({weights, Other(kSealed, kSealed)}), Positions());
  EXPECT_EQ(Anew({weights, Weights(kSealed - 10, kSealed + 90)}), Positions());  // clocks differ
  EXPECT_EQ(Anew({weights, Other(kSealed - 10, kSealed + 9000)}), Positions());  // a log
  EXPECT_EQ(Anew({weights, Other(kSealed + 9000, kSealed + 9000)}), Positions());
}

TEST(FindWrittenAnewTest, AFileThatWasWrittenInItsPlace) {
  StepFile weights = Weights(kSealed - 5000, kSealed + 200);
  EXPECT_EQ(Anew({weights}), Positions{0});
  // A download begins under another name, and several files at once.
  weights.times.changed_ns += 4'000'000;
  EXPECT_EQ(Anew({weights}), Positions());
  weights.times.changed_ns += 3'600'000'000'000;  // somebody linked it
  EXPECT_EQ(Anew({weights}), Positions{0});
}

TEST(FindWrittenAnewTest, AFileThatTookAnothersPlaceAfterAPause) {
  const StepFile weights = Weights(kSealed + 1500, kSealed + 1500);
  EXPECT_EQ(Anew({Weights(kSealed - 2000, kSealed - 1000), weights}), Positions{1});
  // Files that other ranks write last are not a pause.
  EXPECT_EQ(Anew({weights, Other(kSealed + 5, kSealed + 10)}), Positions{0});
  // A hook's file, and the next save long after that.
  EXPECT_EQ(Anew({weights, Other(kSealed + 5, kSealed + 500)}), Positions());
  EXPECT_EQ(Anew({Weights(kSealed + 15'000, kSealed + 16'000), Other(kSealed + 5, kSealed + 500)}),
            Positions{0});
}

TEST(FindWrittenAnewTest, ASmallFileThatIsWrittenAgainBridgesNoPause) {
  const StepFile weights = Weights(kSealed + 2500, kSealed + 2500);
  StepFile last = Other(kSealed + 1, kSealed + 2600);
  EXPECT_EQ(Anew({weights, last}), Positions());  // it may be copied all the time
  last.size = 1000;
  EXPECT_EQ(Anew({weights, last}), Positions{0});
}

TEST(FindWrittenAnewTest, ACopyWithoutTimesMakesNoPause) {
  // One file after the other, that which is written last before the weights.
  EXPECT_EQ(Anew({Other(kSealed + 1, kSealed + 40'000), Weights(kSealed + 40'001, kSealed + 70'000),
                  Weights(kSealed + 70'100, kSealed + 99'000)}),
            Positions());
}

TEST(FindWrittenAnewTest, WithoutATimeOfBirthTheWriterMayBeSlow) {
  EXPECT_EQ(Anew({Weights(0, kSealed + 50'000)}), Positions());
  EXPECT_EQ(Anew({Weights(0, kSealed + 62'000)}), Positions{0});
  EXPECT_EQ(Anew({Weights(0, kSealed + 62'000, 1 << 30)}), Positions());
  // A copy that kept the times of files which a dead save had left.
  EXPECT_EQ(Anew({Weights(kSealed + 900'000, kSealed + 62'000)}), Positions{0});
}

}  // namespace
}  // namespace ckptfs
