// SPDX-License-Identifier: Apache-2.0
//
// Digests of a blob's chunks: what an owned blob is told by.
//
//   chunk k = bytes [k * kChunkBytes, (k + 1) * kChunkBytes), the last shorter;
//             none of an empty blob
//   digest  = XXH3-128 of the chunk
//
// 256 KiB: the digests are 64 bytes per MiB (1/16,384); at 64 KiB they would be four
// times as many.  A chunk is still no more than one request of a storage that is far
// away, and what a defect is narrowed down to.  A file beside the blob has them, but of
// the smallest (chunk_list.h).
//
// Thread safety: one ChunkDigester per blob and thread.
// Units: bytes.

#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/blob.h"
#include "core/io/file.h"

namespace ckptfs {

inline constexpr uint64_t kChunkBytes = uint64_t{256} << 10;

// How many digests a blob of `size` bytes has.
uint64_t ChunkCount(uint64_t size, uint64_t chunk_bytes);

class ChunkDigester {
 public:
  explicit ChunkDigester(uint64_t chunk_bytes = kChunkBytes);

  // REQUIRES: calls follow each other without a gap.
  void Add(std::span<const std::byte> bytes);
  std::vector<Digest> Finish() &&;

 private:
  void EndChunk();
  const uint64_t chunk_bytes_;
  DigestStream hash_;
  uint64_t filled_ = 0;  // of the chunk that is being hashed
  std::vector<Digest> digests_;
};

std::vector<Digest> ChunkDigestsOf(std::string_view bytes);

// kDataLoss if the file becomes shorter.  BLOCKS: on reading all of it.
Result<std::vector<Digest>> ChunkDigestsOfFile(const File& file);

// The digest of a blob's digests, as their file has them (chunk_list.h).
Digest DigestOfChunks(std::span<const Digest> chunks);

// True if all of the blob's chunks have these digests.
bool HasChunks(const Blob& blob, std::span<const Digest> found);

// Says what is wrong with the first chunk whose digest is not the recorded one;
// empty if nothing is.  REQUIRES (both): blob.chunks.
std::string FirstWrongChunk(const Blob& blob, std::span<const Digest> found);
// The same of `found` alone, which are those from byte `begin` on.
// REQUIRES: the blob has as many from there on; begin is a multiple of its chunk_bytes.
std::string WrongChunk(const Blob& blob, uint64_t begin, std::span<const Digest> found);

}  // namespace ckptfs
