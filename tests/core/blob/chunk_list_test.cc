// SPDX-License-Identifier: Apache-2.0

#include "core/blob/chunk_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/memory_root.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

constexpr std::string_view kFolder = "snapshots/0123456789abcdef0123456789abcdef";

Blob BlobOf(const std::string& bytes) {
  Blob blob;
  blob.path = StrCat(kFolder, "/rank-00000.safetensors");
  blob.stamp.size = bytes.size();
  blob.chunk_bytes = kChunkBytes;
  blob.chunks = ChunkDigestsOf(bytes);
  blob.chunk_list = DigestOfChunks(blob.chunks);
  return blob;
}

// As a manifest has it.
Blob Loaded(Blob blob) {
  blob.chunks.clear();
  return blob;
}

void Replace(Storage& storage, const std::string& path, const std::string& bytes) {
  const auto writer = *storage.Create(path);
  ASSERT_TRUE(writer->WriteAt(0, std::as_bytes(std::span(bytes))));
  ASSERT_TRUE(writer->Close());
}

TEST(ChunkListTest, ItHasTheDigestsUnderTheNameOfTheirDigest) {
  const auto storage = std::make_shared<MemoryRoot>("storage");
  const Blob blob = BlobOf(std::string(2 * kChunkBytes + 1, 'x'));
  ASSERT_TRUE(PutChunkList(*storage, "blobs", blob));
  ASSERT_TRUE(PutChunkList(*storage, "blobs", blob)) << "again";
  const std::string path = ChunkListPath(blob);
  const auto bytes = ReadWhole(*storage, StrCat("blobs/", path), 1000);
  ASSERT_TRUE(bytes) << bytes.error().message;
  ASSERT_EQ(bytes->size(), 3 * 16u);
  EXPECT_EQ(path, StrCat(kFolder, "/", DigestOf(*bytes).Hex(), ".digests"));
  Digest last;
  std::memcpy(&last.high, bytes->data() + 32, 8);
  std::memcpy(&last.low, bytes->data() + 40, 8);
  EXPECT_EQ(last, DigestOf("x"));
  const auto read = ReadChunkList(*RootBelow(storage, "blobs"), Loaded(blob));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(*read, blob.chunks);
}

// Below a root that is itself a directory of blobs: as of a copy, which has names of its user.
TEST(ChunkListTest, ItLiesInTheBlobsDirectory) {
  Blob blob = BlobOf("x");
  blob.path = "global_step5/zero/a.pt";
  EXPECT_EQ(ChunkListPath(blob), StrCat(blob.chunk_list.Hex(), ".digests"));
}

TEST(ChunkListTest, OneThatIsMissingOrDamagedIsNamed) {
  const auto storage = std::make_shared<MemoryRoot>("storage");
  const Blob blob = BlobOf(std::string(5 * kChunkBytes, 'x'));
  const std::string path = ChunkListPath(blob);
  const auto refusal = [&] {
    const auto read = ReadChunkList(*storage, Loaded(blob));
    return read ? Error{ErrorCode::kInternal, "it was read"} : read.error();
  };
  EXPECT_EQ(refusal().code, ErrorCode::kNotFound);
  EXPECT_EQ(refusal().message,
            StrCat(storage->PathOf(path), ": the digests of rank-00000.safetensors are missing"));
  ASSERT_TRUE(PutChunkList(*storage, "", blob));
  const std::string good = *ReadWhole(*storage, path, 1000);
  std::string flipped = good;
  flipped[17] ^= 1;
  for (const std::string& bytes :
       {flipped, good.substr(16), good.substr(1), good + "x", StrCat(good, good), std::string()}) {
    Replace(*storage, path, bytes);
    EXPECT_EQ(refusal().code, ErrorCode::kDataLoss) << bytes.size();
    EXPECT_THAT(refusal().message, HasSubstr(path));
    EXPECT_THAT(refusal().message, HasSubstr("are damaged"));
  }
  Replace(*storage, path, good);
  EXPECT_TRUE(ReadChunkList(*storage, Loaded(blob)));
}

TEST(ChunkListTest, TheListsDigestAloneProvesABlob) {
  std::string bytes(3 * kChunkBytes + 9, 'x');
  const Blob blob = Loaded(BlobOf(bytes));
  EXPECT_TRUE(HasChunks(blob, ChunkDigestsOf(bytes)));
  bytes[kChunkBytes] ^= 1;
  EXPECT_FALSE(HasChunks(blob, ChunkDigestsOf(bytes)));
  bytes[kChunkBytes] ^= 1;
  bytes.resize(3 * kChunkBytes);
  EXPECT_FALSE(HasChunks(blob, ChunkDigestsOf(bytes)));
}

}  // namespace
}  // namespace ckptfs
