// SPDX-License-Identifier: Apache-2.0

#include "core/blob/chunk_digests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "core/io/file_root.h"
#include "core/io/file_stamp.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

std::string Bytes(size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 31 + i / 251);
  return bytes;
}

TEST(ChunkDigestsTest, AreOfEveryChunkHoweverTheBytesCome) {
  for (const uint64_t size : {uint64_t{0}, uint64_t{1}, kChunkBytes - 1, kChunkBytes,
                              kChunkBytes + 1, 5 * kChunkBytes + 17}) {
    const std::string bytes = Bytes(size);
    std::vector<Digest> expected;
    for (uint64_t at = 0; at < size; at += kChunkBytes) {
      expected.push_back(DigestOf(std::string_view(bytes).substr(at, kChunkBytes)));
    }
    EXPECT_EQ(ChunkDigestsOf(bytes), expected) << size;
    EXPECT_THAT(expected, SizeIs(ChunkCount(size, kChunkBytes)));
    for (const size_t piece : {size_t{1000}, size_t{kChunkBytes - 3}, size_t{3 * kChunkBytes}}) {
      ChunkDigester digester;
      for (size_t at = 0; at < size; at += piece) {
        digester.Add(std::as_bytes(std::span(bytes)).subspan(at, std::min(piece, size - at)));
      }
      EXPECT_EQ(std::move(digester).Finish(), expected) << size << " by " << piece;
    }
  }
}

TEST(ChunkDigestsTest, OfAFileThatBecameShorterAreDataLoss) {
  const TemporaryDirectory directory;
  const std::string bytes = Bytes(kChunkBytes + 5);
  const std::string path = directory.Write("a", bytes);
  const auto file = *OpenLocalFile(path);
  const auto digests = ChunkDigestsOfFile(*file);
  ASSERT_TRUE(digests) << digests.error().message;
  EXPECT_EQ(*digests, ChunkDigestsOf(bytes));
  ASSERT_EQ(truncate(path.c_str(), 7), 0);
  const auto missing = ChunkDigestsOfFile(*file);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kDataLoss);
  EXPECT_THAT(missing.error().message, HasSubstr(path));
}

TEST(ChunkDigestsTest, TheFirstWrongChunkIsNamed) {
  std::string bytes = Bytes(3 * kChunkBytes + 9);
  Blob blob;
  blob.stamp.size = bytes.size();
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = ChunkDigestsOf(bytes);
  EXPECT_EQ(FirstWrongChunk(blob, ChunkDigestsOf(bytes)), "");
  bytes.back() ^= 1;
  EXPECT_THAT(FirstWrongChunk(blob, ChunkDigestsOf(bytes)), HasSubstr("bytes 786432 to 786441"));
  bytes[0] ^= 1;
  EXPECT_THAT(FirstWrongChunk(blob, ChunkDigestsOf(bytes)), HasSubstr("bytes 0 to 262144"));
  bytes.resize(5);
  EXPECT_THAT(FirstWrongChunk(blob, ChunkDigestsOf(bytes)), HasSubstr("1 chunks, recorded 4"));
}

// An owned blob has only a size to be told by when it is opened.
TEST(ChunkDigestsTest, OfAStampThatIsASizeOnlyTheSizeIsCompared) {
  const BlobStamp owned{5, 0, 0, 0};
  EXPECT_TRUE(CompareStamps("p", owned, BlobStamp{5, 7, 8, 9}));
  const Status other = CompareStamps("p", owned, BlobStamp{6, 7, 8, 9});
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().message, "p changed since it was adopted: size was 5 and is 6");
  EXPECT_FALSE(CompareStamps("p", BlobStamp{5, 1, 0, 0}, BlobStamp{5, 7, 8, 9}));
}

}  // namespace
}  // namespace ckptfs
