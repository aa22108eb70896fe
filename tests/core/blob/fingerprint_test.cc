// SPDX-License-Identifier: Apache-2.0

#include "core/blob/fingerprint.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "core/io/file_root.h"
#include "tests/support/stamp_of_file.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr BlobIndex kBlob{3};

class FingerprintTest : public testing::Test {
 protected:
  void Write(size_t size) {
    bytes_.resize(size);
    for (size_t i = 0; i < size; ++i) bytes_[i] = static_cast<char>(i * 7 + i / 256);
    path_ = directory_.Write("file", bytes_);
    Adopt();
  }
  void Adopt() {
    blob_.stamp = *StampOfFile(path_);
    blob_.fingerprint = *FingerprintOf(**OpenLocalFile(path_));
  }
  // In place, as everybody else does it; the clock of files is coarse.
  void Change(size_t at, size_t length) {
    for (size_t i = at; i < at + length; ++i) bytes_[i] = static_cast<char>(bytes_[i] + 1);
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.write(bytes_.data() + at, static_cast<std::streamsize>(length));
    file.close();
    MoveTimes();
  }
  void MoveTimes() {
    blob_.stamp.mtime_ns -= 1'000'000'000;
    blob_.stamp.ctime_ns -= 1'000'000'000;
  }
  void MoveChangeTime() { blob_.stamp.ctime_ns -= 1'000'000'000; }
  Status Check(const Blob& blob) {
    const auto file = OpenLocalFile(path_);
    if (!file) return Fail(file.error());
    return files_.CheckOpen(**file, kBlob, blob);
  }
  bool IsSame() { return Check(blob_).has_value(); }

  TemporaryDirectory directory_;
  std::string bytes_;
  std::string path_;
  Blob blob_;
  FileCheck files_;
};

TEST_F(FingerprintTest, AChangeTimeAloneIsExcused) {
  for (const size_t size : {0u, 1u, 4096u, 8191u, 40000u, 5000000u}) {
    Write(size);
    EXPECT_TRUE(IsSame());
    MoveChangeTime();
    EXPECT_TRUE(IsSame()) << size;
    MoveChangeTime();  // again, on top of what was excused
    EXPECT_TRUE(IsSame()) << size;
  }
}

TEST_F(FingerprintTest, RealToolsMoveThem) {
  Write(300000);
  ::chmod(path_.c_str(), 0600);
  EXPECT_TRUE(IsSame());
  std::filesystem::create_hard_link(path_, path_ + ".link");
  EXPECT_TRUE(IsSame());
  const timespec times[2] = {{0, 0}, {12345, 0}};  // touch says that it was written
  ::utimensat(AT_FDCWD, path_.c_str(), times, 0);
  EXPECT_FALSE(IsSame());
}

TEST_F(FingerprintTest, AFileWrittenAnewIsNot) {
  for (const size_t size : {20000u, 300000u, 5000000u}) {
    Write(size);
    Change(4096, size - 8192);  // first and last block as they were
    const Status same = Check(blob_);
    ASSERT_FALSE(same) << size;
    EXPECT_EQ(same.error().code, ErrorCode::kStale);
    EXPECT_NE(same.error().message.find("mtime was"), std::string::npos);
  }
}

TEST_F(FingerprintTest, AnOldModificationTimeHelpsNobody) {
  Write(300000);
  Change(4096, 300000 - 8192);
  blob_.stamp.mtime_ns += 1'000'000'000;  // as it is: only the change time moved
  EXPECT_FALSE(IsSame());
}

TEST_F(FingerprintTest, AnotherSizeOrInodeIsNot) {
  Write(300000);
  Blob other = blob_;
  other.stamp.size += 1;
  EXPECT_FALSE(Check(other));
  other = blob_;
  other.stamp.inode += 1;
  EXPECT_FALSE(Check(other));
}

// Manifests of before have only the ends in it.
TEST_F(FingerprintTest, AShortOneExcusesAChangeTime) {
  Write(300000);
  blob_.fingerprint = *ShortFingerprintOf(**OpenLocalFile(path_));
  MoveChangeTime();
  EXPECT_TRUE(IsSame());
}

TEST_F(FingerprintTest, WithoutOneNothingIsExcused) {
  Write(300000);
  blob_.fingerprint = Digest{};
  MoveChangeTime();
  EXPECT_FALSE(IsSame());
}

}  // namespace
}  // namespace ckptfs
