// SPDX-License-Identifier: Apache-2.0
#include "core/store/blob_copy.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/fault_point.h"
#include "core/base/mutex.h"
#include "core/base/pages.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

// Copies one blob, several pieces at a time: a device takes more of several writes than
// of one.  Each piece is compared with its digests before it is written, in memory
// that nobody else can write, and that begins at a page: so it can go past the page
// cache.
class BlobCopy {
 public:
  BlobCopy(const File& file, const Blob& blob, StorageWriter& writer, const WrittenPieces& written)
      : file_(file), blob_(blob), writer_(writer), written_(written) {}

  Status Run() {
    const uint64_t pieces = CeilDiv(blob_.stamp.size, kCopyBytes);
    {
      std::vector<std::jthread> others;
      for (uint64_t i = 1; i < std::min(kCopyThreads, pieces); ++i) {
        others.emplace_back([this] { Work(); });
      }
      Work();
    }
    MutexLock lock(mutex_);
    return done_;
  }

 private:
  static_assert(kCopyBytes % kChunkBytes == 0);

  void Work() {
    const Status done = Caught([this]() -> Status {
      const Pages buffer = MakePages(kCopyBytes);
      for (uint64_t at; (at = next_.fetch_add(kCopyBytes)) < blob_.stamp.size;) {
        if (!written_.empty() && written_[at / kCopyBytes]) continue;
        const uint64_t bytes = std::min(kCopyBytes, blob_.stamp.size - at);
        CKPT_RETURN_IF_ERROR(CopyPiece(at, {buffer.get(), bytes}));
      }
      return {};
    });
    if (done) return;
    next_ = blob_.stamp.size;  // the others end, too
    MutexLock lock(mutex_);
    if (done_) done_ = done;
  }

  Status CopyPiece(uint64_t at, std::span<std::byte> piece) {
    CKPT_RETURN_IF_ERROR(file_.ReadAt(at, piece));
    ChunkDigester digester(kChunkBytes);
    digester.Add(piece);
    const std::string wrong = WrongChunk(blob_, at, std::move(digester).Finish());
    if (!wrong.empty()) return Fail(ErrorCode::kDataLoss, StrCat(blob_.path, ": ", wrong));
    return writer_.WriteAt(at, piece);
  }

  const File& file_;
  const Blob& blob_;
  StorageWriter& writer_;
  const WrittenPieces& written_;
  std::atomic<uint64_t> next_{0};  // offset of the next piece
  Mutex mutex_;
  Status done_ GUARDED_BY(mutex_);
};

}  // namespace

Status CopyOwnedBlob(const Root& bytes, const Blob& blob, StorageWriter& writer,
                     const WrittenPieces& written) {
  CKPT_ASSIGN_OR_RETURN(const auto file, bytes.Open(blob.path));
  if (file->size() != blob.stamp.size || blob.chunk_bytes != kChunkBytes ||
      blob.chunks.size() != ChunkCount(blob.stamp.size, kChunkBytes)) {
    return Fail(ErrorCode::kDataLoss,
                StrCat(blob.path, ": ", file->size(), " bytes, but the manifest says ",
                       blob.stamp.size, " in ", blob.chunks.size(), " chunks"));
  }
  if (written.empty()) CKPT_RETURN_IF_ERROR(writer.Reserve(blob.stamp.size));
  CKPT_RETURN_IF_ERROR(BlobCopy(*file, blob, writer, written).Run());
  FaultPoint();
  return writer.Close();
}

}  // namespace ckptfs
