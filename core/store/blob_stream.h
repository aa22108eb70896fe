// SPDX-License-Identifier: Apache-2.0
//
// BlobStream writes a blob of the store's own while its bytes still come in: when the last
// of them has come, little is left to do.  It never fails a caller: a stream that goes wrong, or is
// not wanted any more, is let go, and the caller copies the blob whole (blob_copy.h).
//
// BlobStreams has those of a store.
//
// Thread safety: all methods may be called concurrently; Add of one stream by one thread.
// Lifetime: BlobStreams may go before its streams, which write no more then.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/io/blob.h"
#include "core/io/io_pool.h"
#include "core/io/root.h"
#include "core/store/blob_copy.h"

namespace ckptfs {

class BlobStream {
 public:
  struct State;
  BlobStream(std::shared_ptr<State> state, std::weak_ptr<IoPool> pool);
  // Gives up what was written, unless it was finished.
  ~BlobStream();
  BlobStream(const BlobStream&) = delete;
  BlobStream& operator=(const BlobStream&) = delete;

  // The bytes that follow; they are read as long as their owner lives.  Returns at once.
  void Add(std::span<const std::byte> bytes);

 private:
  const std::shared_ptr<State> state_;
  const std::weak_ptr<IoPool> pool_;
};

// The part of a blob that was written while it came in.
struct StreamedBlob {
  std::unique_ptr<StorageWriter> writer;  // null: nothing
  WrittenPieces written;
};

class BlobStreams {
 public:
  using Create = std::function<Result<std::unique_ptr<StorageWriter>>()>;
  BlobStreams();

  // Begins a blob of `size` bytes, which `owner` keeps.  Null if that is not worth it, if there
  // are too many, or while one of them fails: what it lacks is not taken from it.
  std::shared_ptr<BlobStream> Begin(const std::string& path, uint64_t size,
                                    std::weak_ptr<const void> owner, Create create);
  // Ends the blob's stream; the caller writes what it lacks.  kDataLoss if what it has is not
  // what the blob's chunks say.  BLOCKS: on the pieces that are being written.
  Result<StreamedBlob> Finish(const Blob& blob);
  // Lets go of all, and of the space that they have.
  void Clear();

 private:
  using StatePtr = std::shared_ptr<BlobStream::State>;

  Mutex mutex_;
  std::map<std::string, std::weak_ptr<BlobStream::State>> streams_ GUARDED_BY(mutex_);
  const std::shared_ptr<IoPool> pool_;
};

}  // namespace ckptfs
