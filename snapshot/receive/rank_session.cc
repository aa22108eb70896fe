// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/rank_session.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/base/names.h"
#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "core/base/trust.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxParts = 64;
// Attempts whose chunks are not free: open, whole, or being stored.
constexpr size_t kMaxHeld = 1024;
// Answers that a client has not read: the daemon does not hear it meanwhile.
constexpr size_t kMaxUnread = 256;
// And those of what others do, beyond two for each of its chunks: it is sent away.
constexpr size_t kMaxOutbox = 4096;
constexpr size_t kMaxQuestions = 16;
constexpr int kMessagesPerTurn = 16;
// A rank that hands over 16 GB a second says a thousand.
constexpr double kMessagesPerSecond = 2000;
constexpr double kMessagesAtOnce = 4096;
constexpr uint64_t kBytesPerTurn = kArenaChunkBytes / 2;
// More than a socket has room for.
constexpr int kMessagesOfTheGone = 1 << 16;
constexpr size_t kMaxJob = 200;
constexpr uint64_t kMaxSlots = 1024;

// Chunks that a received file reads; they are the rank's again with it.
struct ChunkLease {
  ChunkLease(std::shared_ptr<ArenaHold> arena, uint64_t number)
      : hold(std::move(arena)), attempt(number) {
    hold->Begin();
  }
  ~ChunkLease() {
    if (hold->place() != nullptr) hold->place()->Remove(attempt);
    hold->Return(chunks, place);
  }
  const std::shared_ptr<ArenaHold> hold;
  const uint64_t attempt;
  std::vector<uint32_t> chunks;
  std::string place;  // ReceivedFile::shelve
};

// The memory of an arena that a received file uses.
struct FileLease {
  std::shared_ptr<BlobStream> stream;  // writes them until it is asked for the whole file
  std::shared_ptr<const void> chunks;
  std::shared_ptr<const Mapping> mapping;  // ends before they are the rank's again
};

tl::unexpected<Error> Breach(const std::string& rule) {
  return Fail(ErrorCode::kInvalid, StrCat("breaks the protocol: ", rule));
}

// Helpers that a killed rank has forked keep its socket open.
bool HasEnded(const Descriptor& process) {
  pollfd event{process.get(), POLLIN, 0};
  return process.valid() && poll(&event, 1, 0) == 1;
}

int PeerOf(const Descriptor& socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 ? peer.pid : 0;
}

bool HasHungUp(const Descriptor& socket) {
  pollfd event{socket.get(), 0, 0};
  return poll(&event, 1, 0) == 1;
}

}  // namespace

void ArenaBudget::Wake() const {
  const uint64_t one = 1;
  if (write(wake.get(), &one, sizeof one) < 0) return;  // it is awake
}

ArenaHold::ArenaHold(std::unique_ptr<ArenaReader> reader, std::unique_ptr<const FileLock> claim,
                     std::shared_ptr<ShelfPlace> place, uint64_t huge,
                     std::shared_ptr<ArenaBudget> budget)
    : claim_(std::move(claim)),
      place_(std::move(place)),
      reader_(std::move(reader)),
      huge_(huge),
      budget_(std::move(budget)) {
  budget_->huge += huge_;
}

ArenaHold::~ArenaHold() {
  const uint64_t bytes = reader_->shape().bytes();
  if (left_ && claim_) {
    (void)fallocate(claim_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                    static_cast<off_t>(bytes));
  }
  budget_->huge -= huge_;
  budget_->used -= bytes;
}

void ArenaHold::Return(const std::vector<uint32_t>& chunks, const std::string& place) {
  {
    MutexLock lock(mutex_);
    for (const uint32_t chunk : chunks) returned_.push_back({chunk, place});
  }
  --attempts_;
  budget_->Wake();
}

std::vector<ArenaHold::Returned> ArenaHold::TakeReturned() {
  MutexLock lock(mutex_);
  return std::exchange(returned_, {});
}

struct RankSession::Part {
  uint64_t step = 0;
  uint64_t bytes = 0;  // of the whole file
  uint64_t received = 0;
  uint64_t sequence = 0;  // of the next chunk
  bool over = false;      // PartAgain::over
  ReceivedFile file;
  std::shared_ptr<ChunkLease> lease;
  std::shared_ptr<BlobStream> stream;  // may be null
  ChunkDigester digester;

  // The messages that handed it over, up to `end`.
  std::vector<SnapshotMessage> Said(const SnapshotMessage& end) const {
    SnapshotMessage message{SnapshotWord::kBegin};
    message.attempt = end.attempt;
    message.step = step;
    message.length = bytes;
    std::vector<SnapshotMessage> said{message};
    message.word = SnapshotWord::kChunk;
    message.length = 0;
    for (const uint32_t chunk : lease->chunks) {
      message.sequence = said.size() - 1;
      message.chunk = chunk;
      said.push_back(message);
    }
    said.push_back(end);
    return said;
  }
};

RankSession::RankSession(Descriptor socket, uint64_t number, Time now,
                         std::shared_ptr<ArenaBudget> budget)
    : socket_(std::move(socket)),
      number_(number),
      began_(now),
      peer_(PeerOf(socket_)),
      process_(PeerProcess(socket_.get())),
      budget_(std::move(budget)),
      messages_(kMessagesPerSecond, kMessagesAtOnce, now) {}

bool RankSession::Pass(Time now) {
  messages_.Pass(now);
  return messages_.Allows();
}

bool RankSession::wants_to_read() const {
  return !hello_ && messages_.Allows() && outbox_.size() < kMaxUnread && questions_ < kMaxQuestions;
}

Result<bool> RankSession::Receive(IncomingSteps& steps, Arrivals& arrivals) {
  const bool ended = HasEnded(process_);  // before: what it sent last is read first
  // Reads all that a rank said if it is gone: a process that began after
  // that may greet in the next turn, and must not find this one at work.
  const bool gone = ended || HasHungUp(socket_);
  taken_bytes_ = 0;
  const auto enough = [&] { return !gone && (taken_bytes_ >= kBytesPerTurn || !wants_to_read()); };
  for (int i = 0; i < (gone ? kMessagesOfTheGone : kMessagesPerTurn) && !enough(); ++i) {
    CKPT_ASSIGN_OR_RETURN(Incoming incoming, ReceiveSnapshotMessage(socket_.get(), !introduced()));
    if (incoming.kind == Incoming::Kind::kClosed) return false;
    if (incoming.kind == Incoming::Kind::kNothing) return !ended;
    messages_.Use();
    CKPT_RETURN_IF_ERROR(Handle(std::move(incoming), steps, arrivals));
  }
  return true;
}

Status RankSession::Handle(Incoming incoming, IncomingSteps& steps, Arrivals& arrivals) {
  const SnapshotMessage& message = incoming.message;
  if (message.word == SnapshotWord::kHello) return Hello(message, steps);
  if (message.word == SnapshotWord::kReturn) return Return(message, incoming.passed, steps);
  if (!hold_) return Breach("it did not say hello first");
  Status done = HandlePart(message, steps, arrivals);
  if (done || !for_another_) return done;
  Forgo(message.attempt);
  return {};
}

// A ledger may name an attempt that was over already, and whose
// chunks the rank has used again: only that attempt is lost.
void RankSession::Forgo(uint64_t attempt) {
  const auto found = parts_.find(attempt);
  if (found == parts_.end()) return;
  for (const uint32_t chunk : found->second->lease->chunks) ours_[chunk] = false;
  parts_.erase(found);
}

Status RankSession::HandlePart(const SnapshotMessage& message, IncomingSteps& steps,
                               Arrivals& arrivals) {
  switch (message.word) {
    case SnapshotWord::kBegin: return Begin(message, steps);
    case SnapshotWord::kChunk: {
      CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, Chunk(message));
      taken_bytes_ += bytes;
      return {};
    }
    case SnapshotWord::kEnd: return End(message, steps, arrivals);
    case SnapshotWord::kAsk: return Ask(message, steps, arrivals);
    case SnapshotWord::kDrop:
      if (message.sequence != 0) ++budget_->full_drops;
      parts_.erase(message.attempt);
      steps.Cancel(NameOf(message.attempt), message.step, rank_, message.text);
      return {};
    default: return Breach("it sent a message that only the daemon sends");
  }
}

Status RankSession::CheckGreeting(const SnapshotMessage& message) const {
  if (introduced()) return Breach("it sent a second hello");
  const size_t line = message.text.find('\n');
  if (line == std::string::npos) return Breach("its hello does not name a job");
  CKPT_RETURN_IF_ERROR(CheckName(message.text.substr(0, line), "run"));
  if (message.text.size() - line > kMaxJob) return Breach("the job's name is too long");
  if (message.world == 0 || message.world > kMaxSnapshotWorld || message.rank >= message.world) {
    return Breach(StrCat("its rank is ", message.rank, " of ", message.world));
  }
  return {};
}

JobLives::Comes RankSession::how() const {
  if (!back_) return JobLives::Comes::kNew;
  return for_another_ ? JobLives::Comes::kForAnother : JobLives::Comes::kBack;
}

RankOfJob RankSession::WhoSays(const SnapshotMessage& message) {
  const size_t line = message.text.find('\n');
  return {message.text.substr(0, line), message.text.substr(line + 1), message.rank, message.world,
          message.attempt};
}

Status RankSession::Introduce(const SnapshotMessage& message, IncomingSteps& steps) {
  const RankOfJob who = WhoSays(message);
  back_ = message.word == SnapshotWord::kReturn;
  for_another_ = back_ && message.step != 0;
  CKPT_RETURN_IF_ERROR(budget_->ranks.Enter(peer_));
  if (Status greeted = steps.Greet(who, how(), PeerBirth(socket_.get())); !greeted) {
    budget_->ranks.Leave(peer_);
    return greeted;
  }
  run_ = who.run;
  job_ = who.job;
  rank_ = who.rank;
  world_ = who.world;
  life_ = who.life;
  greeting_ = steps.greetings();
  seen_ = TimeSinceBoot();
  return {};
}

Status RankSession::Charge() {
  if (budget_->used.fetch_add(shape_.bytes()) + shape_.bytes() <= budget_->limit) return {};
  const uint64_t others = budget_->used -= shape_.bytes();
  return Fail(ErrorCode::kExhausted,
              StrCat("an arena of ", shape_.bytes(), " bytes and the ", others,
                     " that are in use are more than snapshots may use (--snapshot-memory)"));
}

Status RankSession::Hello(const SnapshotMessage& message, IncomingSteps& steps) {
  CKPT_RETURN_IF_ERROR(CheckGreeting(message));
  asked_ = WhoSays(message);
  attempt_ = message.step;
  const uint64_t slots = message.sequence;
  if (message.length == 0 || slots == 0 || slots > kMaxSlots) {
    return Breach(StrCat("it asked for an arena of ", slots, " times ", message.length, " bytes"));
  }
  shape_ = ArenaShape{budget_->chunk_bytes, 0};
  const uint64_t chunks = shape_.ChunksFor(message.length);
  if (chunks > budget_->limit / budget_->chunk_bytes / slots) {
    return Fail(ErrorCode::kExhausted, StrCat("room for ", slots, " snapshots of ", message.length,
                                              " bytes is more than the ", budget_->limit,
                                              " bytes that snapshots may use (--snapshot-memory)"));
  }
  shape_.chunks = static_cast<uint32_t>(chunks * slots);
  Status charged = Charge();
  if (!charged && budget_->ending != 0) {
    hello_ = message;
    return {};
  }
  if (!charged) {  // what dead processes left in part makes room
    steps.DropLeftBehind();
    charged = Charge();
  }
  CKPT_RETURN_IF_ERROR(charged);
  if (Status known = Introduce(message, steps); !known) {
    budget_->used -= shape_.bytes();
    return known;
  }
  std::promise<Result<ArenaMemory>> made;
  ArenaMaking& making = making_.emplace(ArenaMaking{shape_});
  making.ends = std::make_shared<std::atomic<bool>>(false);
  making.made = made.get_future();
  const auto node = message.chunk == 0 ? std::nullopt : std::optional(message.chunk - 1);
  making.thread = std::thread([made = std::move(made), shape = shape_, budget = budget_, node,
                               ends = making.ends]() mutable {
    auto memory = MakeArena(shape, node, ends.get());
    // Here, since gigabytes take a second to go.
    if (*ends) memory = Fail(ErrorCode::kIo, "the rank has left");
    made.set_value(std::move(memory));
    budget->Wake();
  });
  return {};
}

// The memory is a stranger's.  The fields that are checked cannot change
// any more; its bytes can, and are not believed before their digest.
Status RankSession::Return(const SnapshotMessage& message, const Descriptor& memory,
                           IncomingSteps& steps) {
  CKPT_RETURN_IF_ERROR(CheckGreeting(message));
  if (!memory.valid() || message.sequence > std::numeric_limits<uint32_t>::max()) {
    return Breach("it returned without an arena");
  }
  const ArenaShape shape{message.length, static_cast<uint32_t>(message.sequence)};
  CKPT_RETURN_IF_ERROR(CheckArenaMemory(memory.get(), shape));
  struct stat info;
  if (fstat(memory.get(), &info) != 0 || !IsOwnerTrusted(info, Believed::kOwnUserOrRoot)) {
    return Fail(ErrorCode::kPermission, "the arena belongs to another user");
  }
  auto claim = ClaimArena(memory.get());
  if (!claim) return Fail(ErrorCode::kExists, "the arena is still being read");
  shape_ = shape;
  CKPT_RETURN_IF_ERROR(Charge());
  auto reader = ArenaReader::Open(memory.get(), shape_);
  if (!reader) {
    budget_->used -= shape_.bytes();
    return Fail(std::move(reader).error());
  }
  if (Status known = Introduce(message, steps); !known) {
    budget_->used -= shape_.bytes();
    return known;
  }
  auto place = budget_->shelf ? budget_->shelf->Place(memory.get(), Greeting()) : nullptr;
  hold_ = std::make_shared<ArenaHold>(*std::move(reader), std::move(claim), std::move(place), 0,
                                      budget_);
  ours_.assign(shape_.chunks, false);
  SnapshotMessage welcome{SnapshotWord::kWelcome};
  welcome.length = shape_.chunk_bytes;
  welcome.sequence = shape_.chunks;
  return SendSnapshotMessage(socket_.get(), welcome);
}

Status RankSession::Welcome() {
  making_->thread.join();
  Result<ArenaMemory> memory = making_->made.get();
  making_.reset();
  auto reader =
      memory ? ArenaReader::Open(memory->descriptor.get(), shape_) : Fail(Error(memory.error()));
  if (!reader) {
    budget_->used -= shape_.bytes();
    return Fail(std::move(reader).error());
  }
  const int fd = memory->descriptor.get();
  hold_ =
      std::make_shared<ArenaHold>(*std::move(reader), ClaimArena(fd),
                                  budget_->shelf ? budget_->shelf->Place(fd, Greeting()) : nullptr,
                                  memory->huge_bytes, budget_);
  ours_.assign(shape_.chunks, false);
  SnapshotMessage welcome{SnapshotWord::kWelcome};
  welcome.length = shape_.chunk_bytes;
  welcome.sequence = shape_.chunks;
  return SendSnapshotMessage(socket_.get(), welcome, memory->descriptor.get());
}

// As it would return.
SnapshotMessage RankSession::Greeting() const {
  SnapshotMessage message{SnapshotWord::kReturn};
  message.rank = rank_;
  message.world = world_;
  message.attempt = life_;
  message.length = shape_.chunk_bytes;
  message.sequence = shape_.chunks;
  message.text = StrCat(run_, "\n", job_);
  return message;
}

Status RankSession::Advance(IncomingSteps& steps) {
  if (hello_) {
    const SnapshotMessage hello = *std::exchange(hello_, std::nullopt);
    CKPT_RETURN_IF_ERROR(Hello(hello, steps));
  }
  if (making_ && making_->Ready()) CKPT_RETURN_IF_ERROR(Welcome());
  if (hold_) {
    for (ArenaHold::Returned& returned : hold_->TakeReturned()) {
      ours_[returned.chunk] = false;
      SnapshotMessage message{SnapshotWord::kFree};
      message.chunk = returned.chunk;
      message.sequence = returned.place.empty() ? 0 : 1;
      message.text = std::move(returned.place);
      Say(std::move(message));
    }
  }
  while (!outbox_.empty()) {
    const Status sent = SendSnapshotMessage(socket_.get(), outbox_.front());
    if (!sent && sent.error().code == ErrorCode::kExhausted) break;
    if (!sent) {
      deaf_ = true;
      outbox_.clear();
      break;
    }
    outbox_.pop_front();
  }
  if (outbox_.size() > kMaxOutbox + 2 * ours_.size()) return Breach("it does not read");
  return {};
}

Status RankSession::Begin(const SnapshotMessage& message, IncomingSteps& steps) {
  if (parts_.size() >= kMaxParts || hold_->attempts() >= kMaxHeld) {
    return Breach("it has too many attempts open");
  }
  if (message.length == 0 || message.length > shape_.chunks * shape_.payload_bytes()) {
    return Breach(StrCat("its file cannot have ", message.length, " bytes"));
  }
  const bool fresh = steps.Begin(NameOf(message.attempt), message.step, rank_, message.chunk != 0);
  if (!fresh && (message.chunk == 0 || parts_.contains(message.attempt))) {
    return Breach("it began an earlier attempt again");
  }
  if (message.sequence != 0) ++budget_->full_waits;
  auto part = std::make_unique<Part>();
  part->step = message.step;
  part->bytes = message.length;
  part->file.bytes = message.length;
  part->file.again = message.chunk != 0;
  part->over = !fresh;
  part->lease = std::make_shared<ChunkLease>(hold_, message.attempt);
  if (fresh && !part->file.again) part->stream = Stream(message, steps, part->lease);
  parts_[message.attempt] = std::move(part);
  return {};
}

// Open attempts never set aside more of the store than the arena holds.
std::shared_ptr<BlobStream> RankSession::Stream(const SnapshotMessage& begin, IncomingSteps& steps,
                                                std::weak_ptr<const void> owner) const {
  AttemptName name = NameOf(begin.attempt);
  uint64_t open = begin.length;
  for (const auto& [attempt, part] : parts_) open += part->bytes;
  if (!budget_->stream || open > shape_.chunks * shape_.payload_bytes() || steps.IsGone(name)) {
    return nullptr;
  }
  name.life = steps.LifeOf(name);
  const PreparedRank mine{rank_, begin.length, {}};
  return budget_->stream({std::move(name), begin.step, world_, 0, {mine}}, std::move(owner));
}

Status RankSession::CheckHeader(const ChunkHeader& header, const Part& part) const {
  CKPT_RETURN_IF_ERROR(CheckChunkHeader(header, shape_));
  const uint64_t length = std::min(shape_.payload_bytes(), part.bytes - part.received);
  if (header.rank != rank_ || header.stream != StreamOf(run_, job_) || header.step != part.step ||
      header.sequence != part.sequence || header.length != length) {
    return Breach("it sent a chunk that is not the next one");
  }
  return {};
}

Result<uint64_t> RankSession::Chunk(const SnapshotMessage& message) {
  const auto found = parts_.find(message.attempt);
  if (found == parts_.end()) return Breach("it sent a chunk before it began the attempt");
  Part& part = *found->second;
  if (message.chunk >= shape_.chunks || ours_[message.chunk]) {
    return Breach("it sent a chunk that is not its own");
  }
  if (message.sequence != part.sequence || part.received == part.bytes) {
    return Breach("it sent a chunk that is not the next one");
  }
  const auto chunk = static_cast<uint32_t>(message.chunk);
  ours_[chunk] = true;
  part.lease->chunks.push_back(chunk);
  const ChunkHeader header = hold_->reader().CopyHeader(chunk);
  CKPT_RETURN_IF_ERROR(CheckHeader(header, part));
  if (header.attempt != message.attempt) return Breach("it sent a chunk of another attempt");
  const auto bytes = hold_->reader().Payload(chunk).first(header.length);
  // Both digests of a piece while it is in the processor's cache.
  ChunkDigester whole(bytes.size());
  for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
    const auto piece = bytes.subspan(at, std::min<size_t>(kChunkBytes, bytes.size() - at));
    whole.Add(piece);
    part.digester.Add(piece);
  }
  if (std::move(whole).Finish().front() != header.payload) {
    return Fail(ErrorCode::kDataLoss, StrCat("chunk ", part.sequence, " of step ", part.step,
                                             " is not what its header says"));
  }
  if (part.stream) part.stream->Add(bytes);
  part.file.rope.push_back(bytes);
  part.received += bytes.size();
  ++part.sequence;
  return bytes.size();
}

Status RankSession::End(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals) {
  const auto found = parts_.find(message.attempt);
  if (found == parts_.end()) return Breach("it ended an attempt that it had not begun");
  const std::unique_ptr<Part> part = std::move(found->second);
  parts_.erase(found);
  if (part->received != part->bytes) {
    steps.Drop(NameOf(message.attempt), part->step, StrCat("rank ", rank_, " left bytes out"));
    return Breach("it ended an attempt before all bytes had come");
  }
  part->file.chunks = std::move(part->digester).Finish();
  part->file.unproved = message.length;
  PartAgain again{NameOf(message.attempt), part->step, rank_, world_, {}, part->over};
  again.file.bytes = part->file.bytes;
  again.file.again = part->file.again;
  if (again.file.again) again.file.chunks = part->file.chunks;
  if (again.over) {
    Question(std::move(again), arrivals);
    return {};
  }
  if (hold_->place() != nullptr) hold_->place()->Add(message.attempt, part->Said(message));
  part->file.shelve = [lease = std::weak_ptr(part->lease)](const std::string& place) {
    if (const auto kept = lease.lock()) kept->place = place;
  };
  // A file in one piece can be mapped, so that views are gathered without a copy between.
  auto mapping = hold_->reader().MapPayloads(part->lease->chunks, part->bytes);
  if (mapping) part->file.rope = {mapping->bytes()};
  part->file.lease = std::make_shared<const FileLease>(
      FileLease{std::move(part->stream), std::move(part->lease), std::move(mapping)});
  auto step = steps.Add(again.name, part->step, rank_, world_, std::move(part->file),
                        IncomingSteps::Time::clock::now());
  if (step) {
    arrivals.whole.push_back(*std::move(step));
  } else if (again.file.again) {
    Question(std::move(again), arrivals);
  }
  return {};
}

Status RankSession::Ask(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals) {
  if (message.text.empty()) return Breach("it sent an empty question");
  (void)steps.Begin(NameOf(message.attempt), message.step, rank_, true);  // it is over
  Question({NameOf(message.attempt), message.step, rank_, world_, {}, true, message.text},
           arrivals);
  return {};
}

void RankSession::Question(PartAgain part, Arrivals& arrivals) {
  part.asker = number_;
  ++questions_;
  arrivals.again.push_back(std::move(part));
}

std::optional<std::pair<RankOfJob, Descriptor>> RankSession::Left() {
  if (!introduced() || for_another_ || !process_.valid()) return std::nullopt;
  return std::pair(RankOfJob{run_, job_, rank_, world_, life_}, std::move(process_));
}

void RankSession::Refuse(IncomingSteps& steps, const std::string& why) const {
  if (!hold_) steps.Refuse(asked_, attempt_, StrCat("the daemon refuses: ", why));
}

void RankSession::Leave(IncomingSteps& steps, const std::string& why) {
  for (const auto& [attempt, part] : parts_) {
    steps.Drop(NameOf(attempt), part->step, StrCat("rank ", rank_, " ", why));
  }
  parts_.clear();
  if (introduced()) {
    steps.Leave({run_, job_, rank_, world_, life_}, how(), seen_);
    budget_->ranks.Leave(peer_);
  }
  if (hold_ && !for_another_) hold_->LetGo();
}

std::shared_ptr<ArenaHold> RankSession::TakeHold() {
  std::shared_ptr<ArenaHold> hold = std::exchange(hold_, nullptr);
  return hold.use_count() == 1 ? hold : nullptr;
}

}  // namespace ckptfs
