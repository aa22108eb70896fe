// SPDX-License-Identifier: Apache-2.0

#include "core/store/blob_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/pages.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/store/blob_copy.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxStreams = 64;

}  // namespace

struct BlobStream::State {
  State(uint64_t bytes, std::weak_ptr<const void> kept_by, BlobStreams::Create maker)
      : size(bytes), owner(std::move(kept_by)), create(std::move(maker)) {}

  struct Part {
    uint64_t begin = 0;
    std::span<const std::byte> bytes;
  };
  using Writer = std::unique_ptr<StorageWriter>;

  const uint64_t size;
  const std::weak_ptr<const void> owner;
  const BlobStreams::Create create;

  Mutex mutex;
  CondVar moved;
  std::vector<Part> parts GUARDED_BY(mutex);  // in order, without a gap
  uint64_t added GUARDED_BY(mutex) = 0;
  uint64_t posted GUARDED_BY(mutex) = 0;
  std::map<uint64_t, std::vector<Digest>> written GUARDED_BY(mutex);  // by offset
  Writer writer GUARDED_BY(mutex);
  bool making GUARDED_BY(mutex) = false;  // the writer
  int busy GUARDED_BY(mutex) = 0;         // pieces that use it
  bool over GUARDED_BY(mutex) = false;    // no more pieces
  bool wanted GUARDED_BY(mutex) = false;  // by the caller that finishes it
  bool failed GUARDED_BY(mutex) = false;

  // The caller drops the returned writer, and with it what it had written if no piece uses it.
  Writer End(bool fails);
  Writer TakeUnused() EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Write(uint64_t at, uint64_t bytes);
  Status WritePiece(StorageWriter& to, uint64_t at, std::span<std::byte> piece);
  // Null if it is over.
  Result<StorageWriter*> Use();
  void Copy(uint64_t at, std::span<std::byte> to);
};

BlobStream::State::Writer BlobStream::State::TakeUnused() {
  moved.NotifyAll();
  return over && !wanted && busy == 0 ? std::move(writer) : nullptr;
}

BlobStream::State::Writer BlobStream::State::End(bool fails) {
  MutexLock lock(mutex);
  failed = failed || fails;
  over = true;
  return TakeUnused();
}

Result<StorageWriter*> BlobStream::State::Use() {
  {
    MutexLock lock(mutex);
    while (making && !over) moved.Wait(mutex);
    if (over) return nullptr;
    if (writer) {
      ++busy;
      return writer.get();
    }
    making = true;
  }
  auto made = Caught([&]() -> Result<Writer> {
    CKPT_ASSIGN_OR_RETURN(Writer fresh, create());
    CKPT_RETURN_IF_ERROR(fresh->Reserve(size));
    return fresh;
  });
  Writer gone;
  MutexLock lock(mutex);
  making = false;
  moved.NotifyAll();
  if (!made) return Fail(std::move(made).error());
  if (over) {
    gone = *std::move(made);
    return nullptr;
  }
  writer = *std::move(made);
  ++busy;
  return writer.get();
}

void BlobStream::State::Copy(uint64_t at, std::span<std::byte> to) {
  std::vector<Part> from;
  {
    MutexLock lock(mutex);
    auto part = std::upper_bound(parts.begin(), parts.end(), at,
                                 [](uint64_t byte, const Part& one) { return byte < one.begin; });
    for (--part; part != parts.end() && part->begin < at + to.size(); ++part) from.push_back(*part);
  }
  for (const Part& part : from) {
    const uint64_t begin = std::max(at, part.begin);
    const uint64_t end = std::min(at + to.size(), part.begin + part.bytes.size());
    std::memcpy(to.data() + (begin - at), part.bytes.data() + (begin - part.begin), end - begin);
  }
}

Status BlobStream::State::WritePiece(StorageWriter& to, uint64_t at, std::span<std::byte> piece) {
  {
    const auto kept = owner.lock();
    if (!kept) return Fail(ErrorCode::kNotFound, "its bytes have gone");
    Copy(at, piece);
  }
  ChunkDigester digester(kChunkBytes);
  digester.Add(piece);
  std::vector<Digest> found = std::move(digester).Finish();
  CKPT_RETURN_IF_ERROR(to.WriteAt(at, piece));
  MutexLock lock(mutex);
  written[at] = std::move(found);
  return {};
}

void BlobStream::State::Write(uint64_t at, uint64_t bytes) {
  static thread_local const Pages buffer = MakePages(kCopyBytes);
  const auto to = Use();
  if (to && *to == nullptr) return;
  const Status done = to ? Caught([&] {
    return WritePiece(**to, at, {buffer.get(), bytes});
  })
                         : Fail(Error(to.error()));
  Writer gone;
  MutexLock lock(mutex);
  if (to) --busy;
  if (!done) {
    over = true;
    failed = done.error().code != ErrorCode::kNotFound;
  }
  gone = TakeUnused();
}

BlobStream::BlobStream(std::shared_ptr<State> state, std::weak_ptr<IoPool> pool)
    : state_(std::move(state)), pool_(std::move(pool)) {}

// A store that hangs must not hold up the last owner.
BlobStream::~BlobStream() {
  std::shared_ptr<StorageWriter> gone = state_->End(false);
  const auto pool = gone ? pool_.lock() : nullptr;
  if (!pool) return;
  const Status posted = Caught([&]() -> Status {
    std::function<void()> task = [last = std::move(gone)] {};
    (void)pool->TryPost(task);
    return {};
  });
  (void)posted;  // it went here
}

void BlobStream::Add(std::span<const std::byte> bytes) {
  State& state = *state_;
  std::vector<std::pair<uint64_t, uint64_t>> pieces;
  {
    MutexLock lock(state.mutex);
    if (state.over || bytes.size() > state.size - state.added) return;
    state.parts.push_back({state.added, bytes});
    state.added += bytes.size();
    while (state.posted < state.added) {
      const uint64_t piece = std::min(kCopyBytes, state.size - state.posted);
      if (state.added - state.posted < piece) break;
      pieces.emplace_back(state.posted, piece);
      state.posted += piece;
    }
  }
  const auto pool = pool_.lock();
  for (const auto& [at, size] : pieces) {
    std::function<void()> write = [kept = state_, from = at, count = size] {
      const Status done = Caught([&]() -> Status {
        kept->Write(from, count);
        return {};
      });
      if (!done) (void)kept->End(true);
    };
    if (pool && pool->TryPost(write)) continue;
    (void)state.End(false);
    return;
  }
}

BlobStreams::BlobStreams() : pool_(std::make_shared<IoPool>(kCopyThreads)) {}

std::shared_ptr<BlobStream> BlobStreams::Begin(const std::string& path, uint64_t size,
                                               std::weak_ptr<const void> owner, Create create) {
  if (size <= kCopyBytes) return nullptr;
  auto state = std::make_shared<BlobStream::State>(size, std::move(owner), std::move(create));
  std::vector<StatePtr> others;  // they may end here, outside the lock
  {
    MutexLock lock(mutex_);
    std::erase_if(streams_, [](const auto& one) { return one.second.expired(); });
    for (const auto& [name, other] : streams_) others.push_back(other.lock());
    if (streams_.size() >= kMaxStreams || !streams_.try_emplace(path, state).second) return nullptr;
  }
  const bool failing = std::any_of(others.begin(), others.end(), [](const StatePtr& other) {
    if (!other) return false;
    MutexLock lock(other->mutex);
    return other->failed;
  });
  if (failing) return nullptr;
  return std::make_shared<BlobStream>(std::move(state), pool_);
}

Result<StreamedBlob> BlobStreams::Finish(const Blob& blob) {
  StatePtr state;
  {
    MutexLock lock(mutex_);
    const auto found = streams_.extract(blob.path);
    if (!found.empty()) state = found.mapped().lock();
  }
  StreamedBlob begun;  // destroyed after the lock is given back
  if (!state || state->size != blob.stamp.size || blob.chunk_bytes != kChunkBytes ||
      blob.chunks.size() != ChunkCount(blob.stamp.size, kChunkBytes)) {
    return begun;
  }
  MutexLock lock(state->mutex);
  if (state->over) return begun;
  state->over = state->wanted = true;
  while (state->busy > 0) state->moved.Wait(state->mutex);
  begun.writer = std::move(state->writer);
  if (state->failed || !begun.writer) return StreamedBlob();
  begun.written.resize(CeilDiv(state->size, kCopyBytes));
  for (const auto& [at, digests] : state->written) {
    const std::string wrong = WrongChunk(blob, at, digests);
    if (!wrong.empty()) return Fail(ErrorCode::kDataLoss, StrCat(blob.path, ": ", wrong));
    begun.written[at / kCopyBytes] = true;
  }
  return begun;
}

void BlobStreams::Clear() {
  std::vector<StatePtr> all;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, one] : streams_) all.push_back(one.lock());
  }
  for (const StatePtr& one : all) {
    if (one) (void)one->End(true);
  }
}

}  // namespace ckptfs
