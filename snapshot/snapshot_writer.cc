// SPDX-License-Identifier: Apache-2.0

#include "snapshot/snapshot_writer.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "core/base/mutex.h"
#include "core/base/digest.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/save_job.h"
#include "snapshot/snapshot_link.h"

namespace ckptfs {
namespace {

using Clock = SaveJob::Clock;
using JobPtr = std::shared_ptr<SaveJob>;
using LinkPtr = std::shared_ptr<SnapshotLink>;
using Interrupted = SnapshotLink::Interrupted;

constexpr size_t kKeptOutcomes = 1024;
constexpr size_t kKeptLines = 100;
constexpr std::chrono::seconds kSlowAnswer{1};
constexpr std::string_view kCancelled = "cancelled";

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

struct SnapshotWriter::State {
  explicit State(WriterOptions given);
  void Run();
  bool Begin(Capture capture, Clock::time_point end) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Status TakeRoom(SaveJob& job) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Status FollowDevices(const SaveJob& job) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  bool Pace(const SaveJob& job, uint64_t bytes);
  void Abandon(const SaveJob& job, uint64_t step, const std::string& why);
  Status Prepare(SaveJob& job, Capture capture) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Result<LinkPtr> Connected(uint64_t bytes, const Interrupted& asked)
      EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Result<LinkPtr> Greet(uint64_t bytes, const Interrupted& asked) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  void Hear(SnapshotLink& from, SnapshotLink::News news, const SnapshotMessage& said);
  void Copy(const JobPtr& job);
  Status CopyOrSend(const JobPtr& job);
  Status SendChunk(SaveJob& job);
  Status Verify(const JobPtr& job);
  void Finish(const JobPtr& job, Status done);

  enum class Fate { kUnderWay, kDurable, kDropped, kLeft };
  struct Outcome {
    uint64_t step = 0;
    Fate fate = Fate::kUnderWay;
    const SnapshotLink* link = nullptr;  // to tell it by
    WriterProgress progress = {};
  };
  void Settle(uint64_t attempt, Fate fate, const std::string& why) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void CountDrop(const std::string& what, const std::string& why) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Say(std::string line) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  uint64_t NewAttempt(uint64_t step) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  bool HasUnderWay(const SnapshotLink* of) const EXCLUSIVE_LOCKS_REQUIRED(mutex);
  bool AllSafe() const EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Of the newest save of the step.
  std::optional<Fate> FateOf(uint64_t step) const EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const WriterOptions options;
  const pid_t process = getpid();
  const std::unique_ptr<Copier> eager_copier;
  const std::unique_ptr<Copier> lazy_copier;
  const Digest stream;
  const uint64_t life = RandomDigest().low;

  Mutex save_mutex;  // one Save at a time; before `mutex`
  LinkPtr link GUARDED_BY(save_mutex);
  // Earlier ones, whose arenas became too small, while their steps are written.
  std::vector<LinkPtr> retired GUARDED_BY(save_mutex);
  std::weak_ptr<const SnapshotLink> pinned GUARDED_BY(save_mutex);  // or tried to
  Clock::time_point next_greeting GUARDED_BY(save_mutex) = Clock::time_point::min();
  uint64_t silent GUARDED_BY(save_mutex) = 0;  // the door behind which nobody answered

  Mutex mutex;
  CondVar moved;  // a job became safe or ended, an outcome settled
  std::deque<JobPtr> jobs GUARDED_BY(mutex);
  std::map<uint64_t, Outcome> outcomes GUARDED_BY(mutex);  // by attempt
  uint64_t last_attempt GUARDED_BY(mutex) = 0;
  WriterStatus status GUARDED_BY(mutex);
  std::vector<std::string> log GUARDED_BY(mutex);
  std::string said GUARDED_BY(mutex);  // the trouble that was said last
  bool urgent GUARDED_BY(mutex) = false;
  bool stopping GUARDED_BY(mutex) = false;
  Clock::time_point next_copy = Clock::time_point::min();  // by pace; the copying thread's
  std::thread thread;
};

SnapshotWriter::State::State(WriterOptions given)
    : options(std::move(given)),
      eager_copier(options.make_copier ? options.make_copier() : std::make_unique<HostCopier>()),
      lazy_copier(options.make_copier ? options.make_copier() : std::make_unique<HostCopier>()),
      stream(StreamOf(options.run, options.job)) {
  thread = std::thread([this] { Run(); });
}

void SnapshotWriter::State::Say(std::string line) {
  if (log.size() < kKeptLines) log.push_back(std::move(line));
}

void SnapshotWriter::State::Settle(uint64_t attempt, Fate fate, const std::string& why) {
  const auto found = outcomes.find(attempt);
  if (found == outcomes.end() || found->second.fate != Fate::kUnderWay) return;
  found->second.fate = fate;
  --status.under_way;
  if (fate == Fate::kDurable) {
    found->second.progress.durable = found->second.progress.bytes;
    ++status.durable;
    status.last_durable = found->second.step;
    said.clear();
  } else {
    CountDrop(StrCat("step ", found->second.step, ": "), why);
  }
  while (outcomes.size() > kKeptOutcomes) outcomes.erase(outcomes.begin());
  moved.NotifyAll();
}

void SnapshotWriter::State::CountDrop(const std::string& what, const std::string& why) {
  ++status.dropped;
  status.last_drop = what + why;
  // Who cancels one knows.
  if (said != why && why != kCancelled) Say("snapshot dropped: " + status.last_drop);
  said = why;
}

void SnapshotWriter::State::Hear(SnapshotLink& from, SnapshotLink::News news,
                                 const SnapshotMessage& message) {
  MutexLock lock(mutex);
  if (news == SnapshotLink::News::kSaid) {
    if (message.word == SnapshotWord::kDurable) Settle(message.attempt, Fate::kDurable, "");
    if (message.word == SnapshotWord::kDropped) {
      if (message.sequence != 0) last_attempt = InTurnOf(message.attempt, last_attempt);
      Settle(message.attempt, Fate::kDropped, message.text);
    }
    return;
  }
  status.connected = news == SnapshotLink::News::kBack;
  if (news == SnapshotLink::News::kAway) {
    Say("the daemon went away; snapshots that are not durable wait for another");
  }
  if (news != SnapshotLink::News::kGone) return;
  std::vector<uint64_t> lost;
  for (const auto& [attempt, outcome] : outcomes) {
    if (outcome.link == &from && outcome.fate == Fate::kUnderWay) lost.push_back(attempt);
  }
  const std::string why =
      StrCat("the daemon went away", message.text.empty() ? "" : ": ", message.text);
  for (const uint64_t attempt : lost) Settle(attempt, Fate::kDropped, why);
}

uint64_t SnapshotWriter::State::NewAttempt(uint64_t step) {
  ++status.under_way;
  ++status.saves;
  last_attempt = NextAttempt(last_attempt, step);
  outcomes[last_attempt] = Outcome{step};
  return last_attempt;
}

bool SnapshotWriter::State::HasUnderWay(const SnapshotLink* of) const {
  for (const auto& [attempt, outcome] : outcomes) {
    if (outcome.link == of && outcome.fate == Fate::kUnderWay) return true;
  }
  return false;
}

bool SnapshotWriter::State::AllSafe() const {
  for (const JobPtr& job : jobs) {
    if (!job->safe) return false;
  }
  return true;
}

std::optional<SnapshotWriter::State::Fate> SnapshotWriter::State::FateOf(uint64_t step) const {
  for (auto at = outcomes.rbegin(); at != outcomes.rend(); ++at) {
    if (at->second.step == step) return at->second.fate;
  }
  return std::nullopt;
}

// A link whose arena has room for captures of this size.  A daemon that takes its time to
// say no (it is stopped, say) is asked a tenth of the time at most: training goes on.
Result<LinkPtr> SnapshotWriter::State::Connected(uint64_t bytes, const Interrupted& asked) {
  const auto start = Clock::now();
  const uint64_t door = SnapshotDoorOf(options.store);
  if (start < next_greeting && door == silent && !(link && link->connected())) {
    return Fail(ErrorCode::kIo, "the daemon did not answer, and is asked again later");
  }
  bool interrupted = false;  // that says nothing of the daemon
  auto connected = Greet(bytes, [&] { return interrupted = asked && asked(); });
  const auto now = Clock::now();
  if (!connected && !interrupted && now - start >= kSlowAnswer) {
    next_greeting = now + 9 * (now - start);
    silent = door;
  }
  return connected;
}

Result<LinkPtr> SnapshotWriter::State::Greet(uint64_t bytes, const Interrupted& asked) {
  const uint32_t slots = std::max<uint32_t>(options.slots, 1);
  if (link && (link->gone() || !link->Fits(bytes, slots))) {
    retired.push_back(std::exchange(link, nullptr));
  }
  uint64_t attempt = 0;  // that is being saved
  std::vector<LinkPtr> over;
  {
    MutexLock lock(mutex);
    attempt = last_attempt;
    for (auto& one : retired) {
      if (one->gone() || !HasUnderWay(one.get())) over.push_back(std::exchange(one, nullptr));
    }
  }
  std::erase(retired, nullptr);
  if (link) {
    CKPT_RETURN_IF_ERROR(link->ComeBack(asked));
    return link;
  }
  over.clear();  // before more is asked for: the daemon may have room for one arena only
  const LinkRequest request{options.store, options.run, options.job, options.rank,
                            options.world, bytes,       slots,       life,
                            attempt, options.away_limit, options.welcome_limit};
  const auto hear = [this](auto& from, auto news, auto& words) { Hear(from, news, words); };
  CKPT_ASSIGN_OR_RETURN(link, SnapshotLink::Open(request, hear, asked));
  MutexLock lock(mutex);
  status.connected = link->connected();  // its reader may have told of that first
  return link;
}

Status SnapshotWriter::State::TakeRoom(SaveJob& job) {
  const uint64_t bytes = job.file.bytes();
  job.chunks = job.link->TakeChunks(bytes, Clock::time_point::min());
  if (job.chunks.empty() && options.wait_for_room && !job.link->gone()) {
    job.waited = true;
    {
      MutexLock lock(mutex);
      ++status.full_waits;
    }
    job.chunks = job.link->TakeChunks(bytes, std::min(job.end, Clock::now() + options.update_limit),
                                      [&] { return job.Interrupted(); });
  }
  if (!job.chunks.empty()) return {};
  if (job.interrupted) return Fail(ErrorCode::kExhausted, "interrupted while it waited for room");
  MutexLock lock(mutex);
  ++status.full_drops;
  return Fail(ErrorCode::kExhausted, StrCat(kNoRoom, kMakesRoom));
}

// Copies come after what the devices are doing to the tensors now.
Status SnapshotWriter::State::FollowDevices(const SaveJob& job) {
  const auto& streams = job.file.capture().streams;
  if (streams.empty()) return {};
  CKPT_RETURN_IF_ERROR(eager_copier->Follow(streams));
  CKPT_RETURN_IF_ERROR(lazy_copier->Follow(streams));
  if (pinned.lock() == job.link) return {};
  job.link->KeepPinned(eager_copier->Pin(job.link->arena().All()));
  pinned = job.link;
  return {};
}

// Chunks for all of it, and in them what cannot wait.
Status SnapshotWriter::State::Prepare(SaveJob& job, Capture capture) {
  CKPT_ASSIGN_OR_RETURN(job.file,
                        CaptureFile::Make(std::move(capture), options.rank, options.world));
  CKPT_ASSIGN_OR_RETURN(job.link, Connected(job.file.bytes(), [&] { return job.Interrupted(); }));
  CKPT_RETURN_IF_ERROR(TakeRoom(job));
  CKPT_RETURN_IF_ERROR(FollowDevices(job));
  for (size_t i = 0; i < job.chunks.size(); ++i) {
    CKPT_RETURN_IF_ERROR(eager_copier->Enqueue(job.Copies(i, false), Trainer::kWaits));
  }
  job.samples = SourceSamples(job.file);
  CKPT_RETURN_IF_ERROR(eager_copier->Wait());
  const std::string name = job.Changed(false);
  if (!name.empty()) return Fail(ErrorCode::kStale, StrCat(name, " was written while it was saved"));
  SnapshotMessage message = job.Message(SnapshotWord::kBegin);
  message.length = job.file.bytes();
  message.sequence = job.waited ? 1 : 0;
  return job.link->Send(message);
}

// Nothing of it was handed over.
void SnapshotWriter::State::Abandon(const SaveJob& job, uint64_t step, const std::string& why) {
  {
    MutexLock lock(mutex);  // first: the daemon tells all ranks
    Settle(job.attempt, Fate::kDropped, why);
  }
  if (!job.link) return;
  SnapshotMessage message{SnapshotWord::kDrop};
  message.attempt = job.attempt;
  message.step = step;
  message.text = why;
  message.sequence = why.starts_with(kNoRoom) ? 1 : 0;
  (void)job.link->Send(message);
  job.link->GiveBack(job.chunks);
}

bool SnapshotWriter::State::Begin(Capture capture, Clock::time_point end) {
  auto job = std::make_shared<SaveJob>();
  job->end = end;
  const uint64_t step = capture.step;
  {
    MutexLock lock(mutex);
    job->attempt = NewAttempt(step);
  }
  const Status begun = Caught([&] { return Prepare(*job, std::move(capture)); });
  if (!begun) {
    (void)Caught([&] { return eager_copier->Wait(); });  // what was thrown left copies behind
    Abandon(*job, step, begun.error().message);
    return false;
  }
  MutexLock lock(mutex);
  status.file_bytes = job->file.bytes();
  Outcome& outcome = outcomes[job->attempt];
  outcome.link = job->link.get();
  outcome.progress.bytes = job->file.bytes();
  jobs.push_back(std::move(job));
  moved.NotifyAll();
  return true;
}

void SnapshotWriter::State::Run() {
  while (true) {
    JobPtr job;
    {
      MutexLock lock(mutex);
      while (jobs.empty() && !stopping) moved.Wait(mutex);
      if (jobs.empty()) return;
      job = jobs.front();
    }
    Copy(job);
    MutexLock lock(mutex);
    jobs.pop_front();
    moved.NotifyAll();
  }
}

void SnapshotWriter::State::Copy(const JobPtr& job) {
  Status done;
  while (done && (job->copied < job->chunks.size() || job->sent < job->chunks.size())) {
    done = Caught([&] { return CopyOrSend(job); });
  }
  if (!done) (void)Caught([&] { return lazy_copier->Wait(); });
  Finish(job, done);
}

// One chunk further: what is copied is handed over at once, unless an update waits
// for the copies.
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
    if (Clock::now() >= job->end) return Fail(ErrorCode::kExhausted, "its time is over");
    copy = copy || (urgent && job->copied < job->chunks.size());
    trainer = urgent ? Trainer::kWaits : Trainer::kGoesOn;
  }
  if (!copy) return SendChunk(*job);
  const std::vector<MemoryCopy> copies = job->Copies(job->copied, true);
  uint64_t bytes = 0;
  for (const MemoryCopy& one : copies) bytes += one.bytes;
  if (!Pace(*job, bytes)) return {};
  CKPT_RETURN_IF_ERROR(lazy_copier->Enqueue(copies, trainer));
  CKPT_RETURN_IF_ERROR(lazy_copier->Wait());
  const uint64_t begin = job->ChunkBegin(job->copied);
  const auto copied = job->link->arena().Payload(job->chunks[job->copied]);
  const auto changed = job->samples.FindChange(
      begin, copied.first(job->ChunkEnd(job->copied) - begin));
  if (changed) return Fail(ErrorCode::kStale, StrCat(job->file.KeyAt(*changed), kWritten));
  ++job->copied;
  return job->copied == job->chunks.size() ? Verify(job) : Status();
}

// Returns when the next `bytes` may be read; false if the job is over before.
bool SnapshotWriter::State::Pace(const SaveJob& job, uint64_t bytes) {
  if (options.pace == 0 || bytes == 0) return true;
  const auto start = std::max(Clock::now(), next_copy);
  {
    MutexLock lock(mutex);
    while (!urgent && !stopping && job.failure.empty() &&
           moved.WaitUntil(mutex, std::min(start, job.end))) {
    }
    if (!job.failure.empty() || Clock::now() >= job.end) return false;
  }
  next_copy = start + std::chrono::duration_cast<Clock::duration>(
                          std::chrono::duration<double>(static_cast<double>(bytes) /
                                                        static_cast<double>(options.pace)));
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
  job.link->arena().WriteHeader(chunk, header);
  SnapshotMessage message = job.Message(SnapshotWord::kChunk);
  message.sequence = job.sent;
  message.chunk = chunk;
  ++job.sent;  // whether or not it arrives, it is not ours to reuse
  return job.link->Send(message);
}

// All is copied: nothing of it was written meanwhile, and from now on may be.
Status SnapshotWriter::State::Verify(const JobPtr& job) {
  const std::string name = job->Changed(true);
  MutexLock lock(mutex);
  if (!job->failure.empty()) return Fail(ErrorCode::kExhausted, job->failure);
  job->safe = true;
  moved.NotifyAll();
  if (name.empty()) return {};
  return Fail(ErrorCode::kStale, StrCat(name, kWritten));
}

void SnapshotWriter::State::Finish(const JobPtr& job, Status done) {
  {
    MutexLock lock(mutex);
    if (done && !job->failure.empty()) done = Fail(ErrorCode::kExhausted, job->failure);
    job->ended = true;
    // First: the daemon tells all ranks.
    if (!done) Settle(job->attempt, Fate::kDropped, done.error().message);
  }
  SnapshotMessage message = job->Message(done ? SnapshotWord::kEnd : SnapshotWord::kDrop);
  if (!done) message.text = done.error().message;
  const Status sent = job->link->Send(message);
  job->link->GiveBack({job->chunks.begin() + static_cast<ptrdiff_t>(job->sent), job->chunks.end()});
  MutexLock lock(mutex);
  job->safe = true;
  if (done && !sent) Settle(job->attempt, Fate::kDropped, "the daemon went away");
  // It may have gone before this attempt was known to be its.
  if (job->link->gone()) Settle(job->attempt, Fate::kDropped, "the daemon went away");
  moved.NotifyAll();
}

SnapshotWriter::SnapshotWriter(WriterOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}

SnapshotWriter::~SnapshotWriter() {
  if (getpid() != state_->process) {
    (void)state_.release();  // its threads are not in this process
    return;
  }
  Close();
}

bool SnapshotWriter::Save(Capture capture, std::optional<std::chrono::milliseconds> limit) {
  State& state = *state_;
  if (getpid() != state.process) return false;
  const auto start = Clock::now();
  MutexLock one(state.save_mutex);
  {
    MutexLock lock(state.mutex);
    if (state.stopping) return false;
  }
  const bool begun =
      state.Begin(std::move(capture), limit ? start + *limit : Clock::time_point::max());
  MutexLock lock(state.mutex);
  state.status.save_seconds += SecondsSince(start);
  return begun;
}

bool SnapshotWriter::Cancel(uint64_t step) {
  State& state = *state_;
  if (getpid() != state.process) return false;
  MutexLock lock(state.mutex);
  for (auto job = state.jobs.rbegin(); job != state.jobs.rend(); ++job) {
    if ((*job)->file.capture().step != step) continue;
    if ((*job)->ended) return false;
    (*job)->failure = kCancelled;
    (*job)->safe = true;
    state.moved.NotifyAll();
    return true;
  }
  return false;
}

void SnapshotWriter::Drop(std::optional<uint64_t> step, const std::string& why, const Interrupted& asked) {
  State& state = *state_;
  if (getpid() != state.process) return;
  MutexLock one(state.save_mutex);
  SnapshotMessage message{SnapshotWord::kDrop, 0, 0, step.value_or(0)};
  message.text = why;
  {
    MutexLock lock(state.mutex);
    state.status.saves += step ? 0 : 1;
    if (!step) return state.CountDrop("", why);
    message.attempt = state.NewAttempt(*step);
    state.Settle(message.attempt, State::Fate::kDropped, why);
  }
  // The other ranks hear of it, though this one has handed over nothing yet.
  if (!state.link && state.options.world > 1) (void)state.Connected(1, asked);
  if (state.link) (void)state.link->Send(message);
}

bool SnapshotWriter::WaitBeforeUpdate(std::optional<std::chrono::milliseconds> limit, bool last) {
  State& state = *state_;
  if (getpid() != state.process) return true;
  const auto start = Clock::now();
  MutexLock lock(state.mutex);
  if (state.AllSafe()) return true;
  const auto end = start + limit.value_or(state.options.update_limit);
  state.urgent = true;
  state.moved.NotifyAll();  // copies do not keep their pace now
  while (!state.AllSafe() && state.moved.WaitUntil(state.mutex, end)) {
  }
  state.urgent = false;
  state.status.wait_seconds += SecondsSince(start);
  for (const JobPtr& job : state.jobs) {
    if (job->safe) continue;
    if (!last) return false;
    job->failure = "its copy took longer than an update may wait";
    job->safe = true;
  }
  return true;
}

bool SnapshotWriter::WaitDurable(uint64_t step, std::chrono::milliseconds timeout) {
  State& state = *state_;
  if (getpid() != state.process) return false;
  const auto end = Clock::now() + timeout;
  MutexLock lock(state.mutex);
  while (state.FateOf(step) == State::Fate::kUnderWay && state.moved.WaitUntil(state.mutex, end)) {
  }
  return state.FateOf(step) == State::Fate::kDurable;
}

WriterStatus SnapshotWriter::status() const {
  if (getpid() != state_->process) return {};
  MutexLock lock(state_->mutex);
  return state_->status;
}

WriterProgress SnapshotWriter::Progress(uint64_t step) const {
  if (getpid() != state_->process) return {};
  MutexLock lock(state_->mutex);
  for (auto at = state_->outcomes.rbegin(); at != state_->outcomes.rend(); ++at) {
    if (at->second.step == step) return at->second.progress;
  }
  return {};
}

Result<SnapshotSize> SnapshotWriter::SizeOf(Capture capture) const {
  const WriterOptions& options = state_->options;
  CKPT_ASSIGN_OR_RETURN(const CaptureFile file,
                        CaptureFile::Make(std::move(capture), options.rank, options.world));
  SnapshotSize size{file.bytes()};
  for (const CopyRun& run : file.Runs(0, file.bytes(), true)) size.lazy_bytes += run.bytes;
  const uint64_t chunks = ArenaShape().ChunksFor(file.bytes()) * std::max<uint32_t>(options.slots, 1);
  size.arena_bytes = chunks * ArenaShape().chunk_bytes;
  return size;
}

std::vector<std::string> SnapshotWriter::TakeLog() {
  if (getpid() != state_->process) return {};
  MutexLock lock(state_->mutex);
  return std::exchange(state_->log, {});
}

void SnapshotWriter::Close() {
  State& state = *state_;
  if (getpid() != state.process) return;
  MutexLock one(state.save_mutex);
  {
    MutexLock lock(state.mutex);
    state.stopping = true;
    state.moved.NotifyAll();
  }
  if (state.thread.joinable()) state.thread.join();
  state.link.reset();
  state.retired.clear();
  MutexLock lock(state.mutex);
  for (auto& [attempt, outcome] : state.outcomes) {
    if (outcome.fate != State::Fate::kUnderWay) continue;
    outcome.fate = State::Fate::kLeft;  // the daemon's: nobody here hears what becomes of it
    --state.status.under_way;
  }
  state.moved.NotifyAll();
}

}  // namespace ckptfs
