// SPDX-License-Identifier: Apache-2.0
//
// A SnapshotWriter's copies: what its thread copies and hands over, and what devices copy ahead of
// that, on which an update waits there.

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/trainer/writer_state.h"

namespace ckptfs {
namespace {

using Clock = SaveJob::Clock;
using JobPtr = std::shared_ptr<SaveJob>;

constexpr size_t kTogether = 8;  // chunks: a device's bus is idle between two waits
// Chunks whose copies are under way while others are handed over: a device takes no more than some
// hundred copies before it holds up whoever gives it another.
constexpr size_t kAhead = 256;

}  // namespace

// Copies the next chunk, or several if an update waits for them; or hands over
// a chunk.  A copied chunk is handed over at once, unless an update waits.
Status SnapshotWriter::State::CopyOrSend(const JobPtr& job) {
  bool copy = job->copied == job->sent;
  Trainer trainer;
  {
    MutexLock lock(mutex);
    const auto outcome = outcomes.find(job->attempt);
    if (outcome != outcomes.end() && job->copied > 0) {
      outcome->second.progress.copied = job->ChunkEnd(job->copied - 1);
    }
    if (!job->failure.empty()) return Fail(ErrorCode::kExhausted, job->failure);
    if (Clock::now() >= job->end) return Fail(ErrorCode::kExhausted, "its time limit has passed");
    copy = copy || (urgent && !job->IsCopied());
    trainer = urgent ? Trainer::kWaits : Trainer::kGoesOn;
  }
  if (!copy) return SendChunk(*job);
  if (job->link->pinner() != nullptr) job->link->pinner()->Wait(job->PinnedBytes());
  if (job->proof.is_of_devices()) return LandCopies(job);
  const size_t count = trainer == Trainer::kWaits ? kTogether : 1;
  std::vector<std::vector<MemoryCopy>> chunks;
  uint64_t bytes = 0;
  for (size_t i = job->copied; i < job->chunks.size() && chunks.size() < count; ++i) {
    chunks.push_back(job->Copies(i, true));
    for (const MemoryCopy& one : chunks.back()) bytes += one.bytes;
  }
  if (!Pace(*job, bytes)) return {};
  for (const auto& copies : chunks) CKPT_RETURN_IF_ERROR(lazy_copier->Enqueue(copies, trainer));
  CKPT_RETURN_IF_ERROR(lazy_copier->Wait());
  for (const auto& copies : chunks) {
    const std::string changed = job->FindChange(job->copied, copies);
    if (!changed.empty()) return Fail(ErrorCode::kStale, StrCat(changed, kWritten));
    if (trainer == Trainer::kGoesOn) job->proof.Release(copies);
    ++job->copied;
  }
  return job->IsCopied() ? Verify(job) : Status();
}

// True if copies of a save are under way, or over and not waited for.
bool SnapshotWriter::State::HasBegun(const SaveJob& job) {
  MutexLock copies(copy_mutex);
  return !job.marks.empty();
}

// Waits for the next copies of a save whose copies run ahead.
Status SnapshotWriter::State::LandCopies(const JobPtr& job) {
  if (options.pace != 0 && !HasBegun(*job)) {
    uint64_t bytes = 0;
    for (const MemoryCopy& one : job->Copies(job->copied, true)) bytes += one.bytes;
    if (!Pace(*job, bytes)) return {};
  }
  SaveJob::Begun next;
  {
    MutexLock copies(copy_mutex);
    if (job->marks.empty()) CKPT_RETURN_IF_ERROR(BeginCopies(*job, job->copied + 1));
    next = job->marks.front();
  }
  CKPT_RETURN_IF_ERROR(next.mark->Wait());
  {
    MutexLock copies(copy_mutex);
    job->marks.pop_front();
  }
  job->copied = next.chunks;
  return job->IsCopied() ? Verify(job) : Status();
}

// Has devices copy, for all saves, while chunks are handed over: as many as `kAhead` at a time.
void SnapshotWriter::State::CopyAhead() {
  if (options.pace != 0) return;
  std::vector<JobPtr> ahead;
  {
    MutexLock lock(mutex);
    for (const JobPtr& job : jobs) {
      if (job->proof.is_of_devices() && job->failure.empty() && job->IsPinned()) {
        ahead.push_back(job);
      }
    }
  }
  for (const JobPtr& job : ahead) {
    MutexLock copies(copy_mutex);
    size_t under_way = 0, before = job->copied;
    for (const SaveJob::Begun& one : job->marks) {
      const auto over = one.mark->IsOver();
      if (!over || !*over) under_way += one.chunks - before;
      before = one.chunks;
    }
    const size_t more = kAhead - std::min(kAhead, under_way);
    const size_t end = std::min(job->chunks.size(), job->begun + more);
    const Status begun = Caught([&] { return BeginCopies(*job, end); });
    if (!begun) Fails(*job, begun.error().message);
    // Those of later saves follow what comes after this one.
    if (job->begun < job->chunks.size()) return;
  }
}

// Says why a save will be dropped when its turn comes.
void SnapshotWriter::State::Fails(SaveJob& job, const std::string& why) {
  MutexLock lock(mutex);
  if (job.failure.empty()) job.failure = why;
}

// Begins copies of the first `chunks` chunks of a save, as far as that was not done.
Status SnapshotWriter::State::BeginCopies(SaveJob& job, size_t chunks) {
  while (job.begun < chunks) {
    const size_t end = std::min(chunks, job.begun + kTogether);
    std::vector<MemoryCopy> copies;
    for (size_t i = job.begun; i < end; ++i) {
      const auto its = job.Copies(i, true);
      copies.insert(copies.end(), its.begin(), its.end());
    }
    CKPT_RETURN_IF_ERROR(lazy_copier->Enqueue(copies, Trainer::kGoesOn));
    auto mark = lazy_copier->Mark({});
    if (!mark) {
      (void)lazy_copier->Wait();
      return Fail(std::move(mark).error());
    }
    job.marks.push_back({end, *std::move(mark)});
    job.begun = end;
  }
  return {};
}

// Ends the copies of a save that is dropped: none is under way when this returns.
void SnapshotWriter::State::EndCopies(SaveJob& job) {
  std::deque<SaveJob::Begun> marks;
  {
    MutexLock copies(copy_mutex);
    job.begun = job.chunks.size();
    marks.swap(job.marks);
  }
  for (const SaveJob::Begun& one : marks) (void)Caught([&] { return one.mark->Wait(); });
  (void)Caught([&] { return lazy_copier->Wait(); });  // what an exception left without a mark
}

// Returns when the next `bytes` may be read; false if the job is over before.
bool SnapshotWriter::State::Pace(const SaveJob& job, uint64_t bytes) {
  if (options.pace == 0 || bytes == 0) return true;
  const auto start = std::max(Clock::now(), next_copy);
  {
    MutexLock lock(mutex);
    while (!urgent && !wants_room && !stopping && job.failure.empty() &&
           moved.WaitUntil(mutex, std::min(start, job.end))) {
    }
    if (!job.failure.empty() || Clock::now() >= job.end) return false;
  }
  // The next save does not pay for bytes that were hurried.
  next_copy = std::min(start, Clock::now()) +
              std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                  static_cast<double>(bytes) / static_cast<double>(options.pace)));
  return true;
}

Status SnapshotWriter::State::SendChunk(SaveJob& job) {
  const uint32_t chunk = job.chunks[job.sent];
  ChunkHeader header;
  header.rank = options.rank;
  header.stream = stream;
  header.step = job.file.capture().step;
  header.attempt = job.attempt;
  header.sequence = job.sent;
  header.length = job.ChunkEnd(job.sent) - job.ChunkBegin(job.sent);
  const auto [changed, payload] = job.DigestChunk(job.sent);
  if (!changed.empty()) return Fail(ErrorCode::kStale, StrCat(changed, kWritten));
  header.payload = payload;
  job.link->arena().WriteHeader(chunk, header);
  SnapshotMessage message = job.Message(SnapshotWord::kChunk);
  message.sequence = job.sent;
  message.chunk = chunk;
  ++job.sent;  // it is not ours to reuse, even if it does not arrive
  return job.link->Send(message);
}

// Ends the copying of a job: nothing of it was written meanwhile, and from now on may be.
Status SnapshotWriter::State::Verify(const JobPtr& job) {
  const std::string name = job->proof.is_of_devices() ? "" : job->Changed(true);
  job->proof.Leave();
  {
    MutexLock lock(mutex);
    if (!job->failure.empty()) return Fail(ErrorCode::kExhausted, job->failure);
    job->safe = true;
    moved.NotifyAll();
  }
  job->proof.End();  // beside the update
  if (name.empty()) return {};
  return Fail(ErrorCode::kStale, StrCat(name, kWritten));
}

void SnapshotWriter::State::Finish(const JobPtr& job, Status done) {
  job->proof.End();
  {
    MutexLock lock(mutex);
    if (done && !job->failure.empty()) done = Fail(ErrorCode::kExhausted, job->failure);
    job->ended = true;
    // First: the daemon tells all ranks.
    if (!done) Settle(job->attempt, Fate::kDropped, done.error().message);
  }
  SnapshotMessage message = job->Message(done ? SnapshotWord::kEnd : SnapshotWord::kDrop);
  if (!done) message.text = done.error().message;
  if (done) message.length = job->proof.unproved_bytes();
  const Status sent = job->link->Send(message);
  job->link->GiveBack({job->chunks.begin() + static_cast<ptrdiff_t>(job->sent), job->chunks.end()});
  MutexLock lock(mutex);
  job->safe = true;
  if (done && !sent) Settle(job->attempt, Fate::kDropped, "the daemon went away");
  // The link may have gone before this attempt was known to be its.
  if (job->link->gone()) Settle(job->attempt, Fate::kDropped, "the daemon went away");
  moved.NotifyAll();
}

// Returns the saves that an update on these streams has to come after, and does not yet; nothing if
// it must wait for one itself.
std::optional<std::vector<JobPtr>> SnapshotWriter::State::ToHold(
    std::span<const DeviceStream> streams) {
  std::vector<JobPtr> held;
  MutexLock lock(mutex);
  for (const JobPtr& job : jobs) {
    if (job->safe) continue;
    const bool can = job->proof.is_of_devices() && job->IsPinned() && !streams.empty();
    if (!can) return std::nullopt;
    const bool waits = std::ranges::all_of(streams, [&](const DeviceStream& one) {
      return std::ranges::find(job->held, one) != job->held.end();
    });
    if (!waits) held.push_back(job);
  }
  return held;
}

bool SnapshotWriter::HoldUpdate(std::span<const DeviceStream> streams) {
  State& state = *state_;
  if (getpid() != state.process) return true;
  const auto start = Clock::now();
  const auto held = state.ToHold(streams);
  if (!held || held->empty()) return held.has_value();
  MutexLock copies(state.copy_mutex);
  for (const JobPtr& job : *held) {
    const Status begun = Caught([&] { return state.BeginCopies(*job, job->chunks.size()); });
    if (!begun) state.Fails(*job, begun.error().message);
  }
  const auto mark = state.lazy_copier->Mark(streams);
  if (!mark) return false;
  MutexLock lock(state.mutex);
  for (const JobPtr& job : *held) {
    job->held.insert(job->held.end(), streams.begin(), streams.end());
  }
  state.status.wait_seconds += SecondsSince(start);
  return true;
}

}  // namespace ckptfs
