// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/snapshot_writer.h"

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
using LinkPtr = std::shared_ptr<SnapshotLink>;
using Interrupted = SnapshotLink::Interrupted;

constexpr size_t kKeptOutcomes = 1024;
constexpr size_t kKeptLines = 100;
// Between two saves: what is not durable then says something of the store.
constexpr std::chrono::milliseconds kInterval{100};
constexpr std::string_view kCancelled = "cancelled";

}  // namespace

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

void SnapshotWriter::State::Settle(uint64_t attempt, Fate fate, const std::string& text) {
  const auto found = outcomes.find(attempt);
  if (found == outcomes.end() || found->second.fate != Fate::kUnderWay) {
    kept.Forget(attempt);  // another rank may have dropped it before it was begun there
    return;
  }
  found->second.fate = fate;
  --status.under_way;
  if (fate == Fate::kDurable) {
    kept.Durable(attempt, text);
    found->second.progress.durable = found->second.progress.bytes;
    ++status.durable;
    status.last_durable = found->second.step;
    said.clear();
  } else {
    kept.Forget(attempt);
    CountDrop(StrCat("step ", found->second.step, ": "), text);
  }
  while (outcomes.size() > kKeptOutcomes) outcomes.erase(outcomes.begin());
  moved.NotifyAll();
}

void SnapshotWriter::State::CountDrop(const std::string& what, const std::string& why) {
  ++status.dropped;
  status.last_drop = what + why;
  // A caller that cancels a save knows of it.
  if (said != why && why != kCancelled) Say("snapshot dropped: " + status.last_drop);
  said = why;
}

void SnapshotWriter::State::Hear(SnapshotLink& from, SnapshotLink::News news,
                                 const SnapshotMessage& message) {
  MutexLock lock(mutex);
  if (news == SnapshotLink::News::kSaid) {
    if (message.word == SnapshotWord::kDurable)
      Settle(message.attempt, Fate::kDurable, message.text);
    if (message.word == SnapshotWord::kDropped) {
      if (message.sequence != 0) last_attempt = InTurnOf(message.attempt, last_attempt);
      kept.Refused(message.attempt);
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

Status SnapshotWriter::State::TakeRoom(SaveJob& job) {
  const uint64_t bytes = job.file.bytes();
  job.chunks = job.link->TakeChunks(bytes, Clock::time_point::min());
  if (job.chunks.empty() && options.wait_for_room && !job.link->gone()) {
    job.waited = true;
    {
      MutexLock lock(mutex);
      ++status.full_waits;
      wants_room = true;
      moved.NotifyAll();  // copies that hold the room do not keep their pace now
    }
    job.chunks = job.link->TakeChunks(bytes, std::min(job.end, Clock::now() + options.update_limit),
                                      [&] { return job.Interrupted(); });
    MutexLock lock(mutex);
    wants_room = false;
  }
  if (!job.chunks.empty()) {
    SayFull(job);
    return {};
  }
  if (job.interrupted) return Fail(ErrorCode::kExhausted, "interrupted while it waited for room");
  MutexLock lock(mutex);
  ++status.full_drops;
  return Fail(ErrorCode::kExhausted, StrCat(kNoRoom, kMakesRoom));
}

// Says at the second save, and not when the first is dropped, that the store is too slow: a save
// that came an interval ago is not durable, and the arena has no room for one after this.
void SnapshotWriter::State::SayFull(const SaveJob& job) {
  const auto now = Clock::now();
  const bool waited = now - std::exchange(last_taken, now) >= kInterval;
  if (!waited || job.link->HasRoom(job.file.bytes())) return;
  MutexLock lock(mutex);
  if (said_full || status.under_way < 2) return;
  said_full = true;
  Say(StrCat("saves come faster than steps become durable: ", status.under_way,
             " are under way and fill the arena, and the next is ",
             options.wait_for_room ? "held up" : "dropped", " if none is durable by then",
             kMakesRoom));
}

// Makes copies come after what the devices are doing to the tensors now.
Status SnapshotWriter::State::FollowDevices(SaveJob& job) {
  const auto& streams = job.file.capture().streams;
  if (streams.empty()) return {};
  CKPT_RETURN_IF_ERROR(eager_copier->Follow(streams));
  const uint64_t chunk_bytes = job.link->shape().payload_bytes();
  const Status digested = job.proof.BeginDevices(job.file, chunk_bytes, *eager_copier);
  if (!digested && digested.error().code != ErrorCode::kUnsupported) return digested;
  if (!digested) SayUnproved(digested.error().message);
  CKPT_RETURN_IF_ERROR(lazy_copier->Follow(streams));
  if (job.link->pinner() == nullptr) PinArena(*job.link, streams.front().device);
  job.link->pinner()->TryAgain();
  return {};
}

void SnapshotWriter::State::SayUnproved(const std::string& why) {
  MutexLock lock(mutex);
  if (std::exchange(said_unproved, why) == why) return;
  Say(
      StrCat("snapshots are unproved: a write to a device's memory between a save and its copy is "
             "not "
             "seen unless the writer calls before_update() (",
             why, ")"));
}

// Takes chunks for all of it, and copies into them what cannot wait.
Status SnapshotWriter::State::Prepare(SaveJob& job, Capture capture) {
  CKPT_ASSIGN_OR_RETURN(job.file,
                        CaptureFile::Make(std::move(capture), options.rank, options.world, &kept));
  job.digests = std::make_shared<TensorDigests>(job.file.TakeDigests());
  kept.Begin(job.attempt, job.digests, job.file.kept(), job.file.bytes());
  job.proof.Begin(job.file);  // before room is waited for, while a signal's handler may write
  CKPT_ASSIGN_OR_RETURN(job.link, Connected(job.file.bytes(), [&] { return job.Interrupted(); }));
  CKPT_RETURN_IF_ERROR(TakeRoom(job));
  CKPT_RETURN_IF_ERROR(FollowDevices(job));
  job.file.SayUnproved(job.proof.unproved_bytes());
  for (size_t i = 0; i < job.chunks.size(); ++i) {
    CKPT_RETURN_IF_ERROR(eager_copier->Enqueue(job.Copies(i, false), Trainer::kWaits));
  }
  CKPT_RETURN_IF_ERROR(eager_copier->Wait());
  std::string name = job.Changed(false);
  // Memory that is copied later is compared with its digest, and may be written by then.
  if (name.empty() && job.proof.is_of_devices()) name = job.Changed(true);
  if (!name.empty())
    return Fail(ErrorCode::kStale, StrCat(name,
                                          " was written while it was being "
                                          "saved"));
  SnapshotMessage message = job.Message(SnapshotWord::kBegin);
  message.length = job.file.bytes();
  message.sequence = job.waited ? 1 : 0;
  return job.link->Send(message);
}

// Drops a save of which nothing was handed over.
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
    (void)Caught([&] { return eager_copier->Wait(); });  // the exception left copies behind
    Abandon(*job, step, begun.error().message);
    return false;
  }
  MutexLock lock(mutex);
  status.file_bytes = job->file.bytes();
  status.unproved_bytes = job->proof.unproved_bytes();
  status.unproved += status.unproved_bytes > 0 ? 1 : 0;
  Outcome& outcome = outcomes[job->attempt];
  outcome.link = job->link.get();
  outcome.progress.bytes = job->file.bytes();
  jobs.push_back(std::move(job));
  moved.NotifyAll();
  return true;
}

void SnapshotWriter::State::Run() {
  while (const JobPtr job = Next()) {
    CopyAhead();
    Status done = Caught([&] { return CopyOrSend(job); });
    if (!done && job->proof.is_of_devices()) EndCopies(*job);
    if (!done && !job->proof.is_of_devices()) (void)Caught([&] { return lazy_copier->Wait(); });
    if (done && !job->IsOver()) continue;
    Finish(job, done);
    MutexLock lock(mutex);
    std::erase(jobs, job);
    moved.NotifyAll();
  }
}

// Returns the oldest job; while an update waits, the oldest that it waits for,
// so that memory is copied before anything else is handed over.  Null: the end.
SnapshotWriter::State::JobPtr SnapshotWriter::State::Next() {
  MutexLock lock(mutex);
  while (jobs.empty() && !stopping) moved.Wait(mutex);
  if (jobs.empty()) return nullptr;
  const auto waited =
      std::ranges::find_if(jobs, [](const JobPtr& job) { return !job->IsCopied(); });
  return urgent && waited != jobs.end() ? *waited : jobs.front();
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

void SnapshotWriter::Expect(uint64_t bytes, int device) {
  State& state = *state_;
  if (getpid() != state.process) return;
  MutexLock lock(state.mutex);
  if (state.maker.joinable() || state.stopping || state.status.saves != 0) return;
  state.making = true;
  state.maker = std::thread([&state, bytes, device] { state.MakeAhead(bytes, device); });
}

bool SnapshotWriter::Save(Capture capture, std::optional<std::chrono::milliseconds> limit) {
  State& state = *state_;
  if (getpid() != state.process) return false;
  const auto start = Clock::now();
  MutexLock one(state.save_mutex);
  {
    MutexLock lock(state.mutex);
    if (state.stopping) {
      ++state.status.saves;
      state.CountDrop(StrCat("step ", capture.step, ": "), "it was saved after close()");
      return false;
    }
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

void SnapshotWriter::Drop(std::optional<uint64_t> step, const std::string& why,
                          const Interrupted& asked) {
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
  // Tells the other ranks, though this one has handed over nothing yet.
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
  return ckptfs::SizeOf(std::move(capture), options.rank, options.world, options.slots);
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
  if (state.maker.joinable()) state.maker.join();
  const LinkPtr unused = [&] {
    MutexLock lock(state.mutex);
    return std::exchange(state.ready, nullptr);
  }();
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
