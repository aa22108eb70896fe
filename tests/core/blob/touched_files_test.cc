// SPDX-License-Identifier: Apache-2.0

#include "core/blob/touched_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "core/base/crc32.h"
#include "core/base/strings.h"
#include "core/blob/blob_reader.h"
#include "core/blob/chunk_digests.h"
#include "core/io/file_root.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

constexpr BlobIndex kTouchedBlob{0};
constexpr size_t kRecord = 64;  // where the only record begins; 8 bytes before it: its checksum

// Records as a format would state them, in the file itself.
Result<std::vector<FileRecord>> RecordsIn(const std::shared_ptr<const File>& file) {
  uint32_t crc = 0;
  CKPT_RETURN_IF_ERROR(file->ReadAt(kRecord - 8, std::as_writable_bytes(std::span(&crc, 1))));
  return std::vector<FileRecord>{{"data", kRecord, file->size() - kRecord, crc}};
}

class TouchedFilesTest : public testing::Test {
 protected:
  TouchedFilesTest() {
    bytes_.resize(40000);
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i * 7 + i / 256);
    const uint32_t crc = Crc32(0, std::as_bytes(std::span(bytes_)).subspan(kRecord));
    std::memcpy(bytes_.data() + kRecord - 8, &crc, sizeof(crc));
    path_ = directory_.Write("file", bytes_);
    const auto file = *OpenLocalFile(path_);
    blob_.path = "file";
    blob_.stamp = file->Identity()->stamp;
    blob_.fingerprint = *FingerprintOf(*file);
    blob_.frame = *FrameDigestOf(*file, *RecordsIn(file));
    model_.roots = {directory_.path()};
    Touch(1000);
  }

  // The modification time, to a time of its own.
  void Touch(int64_t seconds) {
    const timespec times[2] = {{0, UTIME_OMIT}, {seconds, 0}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path_.c_str(), times, 0), 0);
  }
  void Put(size_t at, char byte) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  }
  BlobReader& Reader() {
    model_.blobs = {blob_};
    BlobReader::Options options;
    options.check_interval = std::chrono::milliseconds(0);
    options.touched = touched_;
    reader_ = BlobReader::Create(model_, options);
    return *reader_;
  }
  // All that a reader gets, or the name of its error.
  static std::string Read(BlobReader& reader, size_t size) {
    std::string out(size, '?');
    const Status read = reader.Read(kTouchedBlob, 0, std::as_writable_bytes(std::span(out)));
    return read ? out : std::string(ErrorCodeName(read.error().code));
  }
  std::string Read(BlobReader& reader) const { return Read(reader, bytes_.size()); }
  const std::string stale_{ErrorCodeName(ErrorCode::kStale)};

  TemporaryDirectory directory_;
  std::string bytes_;
  std::string path_;
  Blob blob_;
  StepModel model_;
  std::vector<std::string> said_;
  std::shared_ptr<TouchedFiles> touched_ = std::make_shared<TouchedFiles>(TouchedFiles::Options{
      RecordsIn, [this](std::string_view line) { said_.emplace_back(line); }});
  std::unique_ptr<BlobReader> reader_;
};

TEST_F(TouchedFilesTest, ATouchStopsNoReaderAndIsReadOnce) {
  BlobReader& reader = Reader();
  EXPECT_EQ(Read(reader), bytes_);
  EXPECT_EQ(touched_->files_read(), 1u);
  EXPECT_EQ(touched_->bytes_read(), bytes_.size());
  ASSERT_EQ(said_.size(), 1u);
  EXPECT_NE(said_[0].find(path_ + " was touched"), std::string::npos);
  EXPECT_EQ(Read(Reader()), bytes_);  // another reader of the same
  EXPECT_TRUE(reader_->Check(kTouchedBlob));
  EXPECT_EQ(touched_->files_read(), 1u);
  Touch(2000);  // under a reader that has it mapped
  EXPECT_EQ(Read(*reader_), bytes_);
  EXPECT_EQ(touched_->files_read(), 2u);
  ::chmod(path_.c_str(), 0600);
  EXPECT_EQ(Read(*reader_), bytes_);
}

TEST_F(TouchedFilesTest, NoChangedBitComesThrough) {
  for (size_t at = 0; at < bytes_.size(); at += at < 80 ? 9 : 3989) {
    const int64_t time = 5000 + static_cast<int64_t>(at);
    BlobReader& reader = Reader();
    Touch(time);
    ASSERT_EQ(Read(reader), bytes_) << at;
    Put(at, static_cast<char>(bytes_[at] ^ 4));
    Touch(time + 1);
    ASSERT_EQ(Read(reader), stale_) << at;
    ASSERT_EQ(Read(Reader()), stale_) << at;
    Put(at, bytes_[at]);
  }
}

TEST_F(TouchedFilesTest, WhatWasFoundOutIsNotReadAgain) {
  Put(9000, static_cast<char>(bytes_[9000] ^ 1));  // in no block of the fingerprint
  Touch(3000);
  BlobReader& reader = Reader();
  EXPECT_EQ(*reader.LookAt(kTouchedBlob), Look::kAll);  // before somebody reads
  EXPECT_EQ(touched_->files_read(), 0u);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Read(reader), stale_);
  EXPECT_EQ(touched_->files_read(), 1u);
  EXPECT_EQ(reader.LookAt(kTouchedBlob).error().code, ErrorCode::kStale);
}

TEST_F(TouchedFilesTest, ManyReadersAreOneRead) {
  BlobReader& reader = Reader();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&] { wrong += Read(reader) == bytes_ ? 0 : 1; });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(touched_->files_read(), 1u);
}

TEST_F(TouchedFilesTest, WhatCannotBeToldIsAChange) {
  const Blob with = blob_;
  blob_.frame = Digest{};  // no checksums, or a manifest of before
  EXPECT_EQ(Read(Reader()), stale_);
  blob_ = with;
  blob_.stamp.inode += 1;
  EXPECT_EQ(Read(Reader()), stale_);
  blob_ = with;
  touched_ = nullptr;
  EXPECT_EQ(Read(Reader()), stale_);
  EXPECT_EQ(Reader().LookAt(kTouchedBlob).error().code, ErrorCode::kStale);
}

TEST_F(TouchedFilesTest, ChunksTellWithoutRecords) {
  blob_.frame = Digest{};
  blob_.chunk_bytes = kChunkBytes;
  blob_.chunks = ChunkDigestsOf(bytes_);
  touched_ = std::make_shared<TouchedFiles>(TouchedFiles::Options{});
  EXPECT_EQ(Read(Reader()), bytes_);
  Put(7, '!');
  Touch(4000);
  EXPECT_EQ(Read(Reader()), stale_);
}

// A job that began before may have read bytes that somebody put back since.
TEST_F(TouchedFilesTest, AJobIsToldOfATouchMeanwhile) {
  BlobReader& reader = Reader();
  EXPECT_EQ(Read(reader), bytes_);
  EXPECT_TRUE(reader.CheckOpen());
  EXPECT_EQ(reader.moved(), 0u);
  Touch(6000);
  EXPECT_FALSE(reader.CheckOpen());
  EXPECT_EQ(Read(reader), bytes_);
  EXPECT_EQ(reader.moved(), 1u);
  EXPECT_EQ(reader.CheckOpen().error().code, ErrorCode::kStale);
}

// Moves whenever its records are looked at.
TEST_F(TouchedFilesTest, AFileThatKeepsMovingIsStale) {
  int64_t now = 7000;
  touched_ = std::make_shared<TouchedFiles>(
      TouchedFiles::Options{[&](const std::shared_ptr<const File>& file) {
                              Touch(++now);
                              return RecordsIn(file);
                            },
                            nullptr});
  EXPECT_EQ(Read(Reader()), stale_);
  EXPECT_LE(now, 7010);  // not for ever
  EXPECT_EQ(touched_->files_read(), 0u);
}

}  // namespace
}  // namespace ckptfs
