// SPDX-License-Identifier: Apache-2.0

#include "core/blob/chunk_list.h"

#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/blob_directories.h"

namespace ckptfs {
namespace {

static_assert(std::endian::native == std::endian::little && sizeof(Digest) == 16);

}  // namespace

std::string ChunkListPath(const Blob& blob) {
  return JoinPath(BlobDirectoryOf(blob.path), StrCat(blob.chunk_list.Hex(), ".digests"));
}

Result<std::vector<Digest>> ReadChunkList(const Root& root, const Blob& blob) {
  const std::string path = ChunkListPath(blob);
  const auto refuse = [&](ErrorCode code, std::string_view rule) {
    return Fail(
        code, StrCat(root.PathOf(path), ": the digests of ", LastComponent(blob.path), " ", rule));
  };
  std::vector<Digest> chunks(ChunkCount(blob.stamp.size, blob.chunk_bytes));
  const auto to = std::as_writable_bytes(std::span(chunks));
  const auto bytes = ReadWhole(root, path, to.size());
  const ErrorCode why = bytes ? ErrorCode::kDataLoss : bytes.error().code;
  if (why == ErrorCode::kNotFound) return refuse(why, "are missing");
  const bool other = why == ErrorCode::kInvalid || (bytes && bytes->size() != to.size());
  if (other) return refuse(ErrorCode::kDataLoss, "are damaged");
  if (!bytes) return Fail(Error(bytes.error()));
  std::memcpy(to.data(), bytes->data(), to.size());
  if (DigestOfChunks(chunks) != blob.chunk_list) return refuse(why, "are damaged");
  return chunks;
}

Status PutChunkList(Storage& storage, std::string_view root, const Blob& blob) {
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage.Create(JoinPath(root, ChunkListPath(blob))));
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(blob.chunks))));
  FaultPoint();
  CKPT_RETURN_IF_ERROR(writer->Close());
  FaultPoint();
  return {};
}

}  // namespace ckptfs
