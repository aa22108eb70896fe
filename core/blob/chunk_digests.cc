// SPDX-License-Identifier: Apache-2.0

#include "core/blob/chunk_digests.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/blob/frame.h"

namespace ckptfs {

uint64_t ChunkCount(uint64_t size, uint64_t chunk_bytes) { return CeilDiv(size, chunk_bytes); }

ChunkDigester::ChunkDigester(uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {}

void ChunkDigester::Add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t length = std::min<uint64_t>(bytes.size(), chunk_bytes_ - filled_);
    if (length == chunk_bytes_) {  // a whole chunk needs no state
      digests_.push_back(DigestOf(bytes.first(length)));
    } else {
      hash_.Add(bytes.first(length));
      filled_ += length;
      if (filled_ == chunk_bytes_) EndChunk();
    }
    bytes = bytes.subspan(length);
  }
}

void ChunkDigester::EndChunk() {
  digests_.push_back(hash_.Finish());
  filled_ = 0;
}

std::vector<Digest> ChunkDigester::Finish() && {
  if (filled_ > 0) EndChunk();
  return std::move(digests_);
}

std::vector<Digest> ChunkDigestsOf(std::string_view bytes) {
  ChunkDigester digester;
  digester.Add(std::as_bytes(std::span(bytes)));
  return std::move(digester).Finish();
}

Result<std::vector<Digest>> ChunkDigestsOfFile(const File& file) {
  ChunkDigester digester;
  CKPT_RETURN_IF_ERROR(ReadAllOf(file, [&](uint64_t, std::span<const std::byte> bytes) -> Status {
    digester.Add(bytes);
    return {};
  }));
  return std::move(digester).Finish();
}

Digest DigestOfChunks(std::span<const Digest> chunks) { return DigestOf(std::as_bytes(chunks)); }

bool HasChunks(const Blob& blob, std::span<const Digest> found) {
  if (blob.chunk_list == Digest{}) return std::ranges::equal(blob.chunks, found);
  return found.size() == ChunkCount(blob.stamp.size, blob.chunk_bytes) &&
         DigestOfChunks(found) == blob.chunk_list;
}

std::string FirstWrongChunk(const Blob& blob, std::span<const Digest> found) {
  if (blob.chunks.size() != found.size()) {
    return StrCat(found.size(), " chunks, recorded ", blob.chunks.size());
  }
  return WrongChunk(blob, 0, found);
}

std::string WrongChunk(const Blob& blob, uint64_t begin, std::span<const Digest> found) {
  const auto first = blob.chunks.begin() + static_cast<ptrdiff_t>(begin / blob.chunk_bytes);
  const auto [wrong, recorded] = std::mismatch(found.begin(), found.end(), first);
  if (wrong == found.end()) return {};
  begin += static_cast<uint64_t>(wrong - found.begin()) * blob.chunk_bytes;
  const uint64_t end = std::min(blob.stamp.size, begin + blob.chunk_bytes);
  return StrCat("the digest of bytes ", begin, " to ", end, " is ", wrong->Hex(), ", recorded ",
                recorded->Hex());
}

}  // namespace ckptfs
