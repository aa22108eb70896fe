// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/snapshot_link.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr std::chrono::milliseconds kSendPatience{10'000};
constexpr std::chrono::milliseconds kSlice{200};      // between looks if the wait is interrupted
constexpr std::chrono::milliseconds kLookPause{250};  // for another daemon

void SetPatience(int socket, int option, std::chrono::milliseconds patience) {
  const timeval time{patience.count() / 1000, patience.count() % 1000 * 1000};
  setsockopt(socket, SOL_SOCKET, option, &time, sizeof time);
}

SnapshotMessage Greeting(const LinkRequest& request, SnapshotWord word) {
  SnapshotMessage message{word};
  message.rank = request.rank;
  message.world = request.world;
  message.attempt = request.life;
  message.text = StrCat(request.run, "\n", request.job);
  return message;
}

Result<Incoming> AwaitMessage(int socket, std::chrono::milliseconds patience,
                              const SnapshotLink::Interrupted& interrupted) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    pollfd answers{socket, POLLIN, 0};
    const auto slice = std::clamp(left, std::chrono::milliseconds(0), kSlice);
    const int ready = poll(&answers, 1, static_cast<int>(slice.count()));
    if (ready > 0) return ReceiveSnapshotMessage(socket, true);
    if (ready < 0 && errno != EINTR) return Fail(ErrnoError(errno, "snapshots"));
    if (left.count() <= 0) return Incoming();
    if (interrupted && interrupted()) return Fail(ErrorCode::kIo, "interrupted");
  }
}

// Returns the welcome that answers a greeting; kExists if it is refused for now.
Result<Incoming> Greet(int socket, const SnapshotMessage& greeting, int passed,
                       std::chrono::milliseconds patience,
                       const SnapshotLink::Interrupted& interrupted) {
  SetPatience(socket, SO_SNDTIMEO, kSendPatience);
  CKPT_RETURN_IF_ERROR(SendSnapshotMessage(socket, greeting, passed));
  CKPT_ASSIGN_OR_RETURN(Incoming answer, AwaitMessage(socket, patience, interrupted));
  if (answer.kind != Incoming::Kind::kMessage) {
    return Fail(ErrorCode::kIo, "the daemon does not answer");
  }
  const SnapshotMessage& said = answer.message;
  if (said.word != SnapshotWord::kWelcome) {
    const bool later = said.word == SnapshotWord::kRefused && said.sequence != 0;
    return Fail(later ? ErrorCode::kExists : ErrorCode::kPermission,
                StrCat("the daemon refuses: ", said.text));
  }
  return answer;
}

}  // namespace

Result<std::shared_ptr<SnapshotLink>> SnapshotLink::Open(const LinkRequest& request, Hear hear,
                                                         const Interrupted& interrupted) {
  CKPT_ASSIGN_OR_RETURN(Descriptor socket, ConnectForSnapshots(request.store));
  SnapshotMessage hello = Greeting(request, SnapshotWord::kHello);
  hello.length = request.bytes;
  hello.sequence = request.slots;
  hello.step = request.attempt;
  unsigned processor = 0, node = 0;
  if (getcpu(&processor, &node) == 0) hello.chunk = 1 + uint64_t{node};
  CKPT_ASSIGN_OR_RETURN(Incoming answer,
                        Greet(socket.get(), hello, -1, request.welcome, interrupted));
  ArenaShape shape{answer.message.length, static_cast<uint32_t>(answer.message.sequence)};
  CKPT_ASSIGN_OR_RETURN(auto arena, ArenaWriter::Open(answer.passed.get(), shape));
  std::shared_ptr<SnapshotLink> link(
      new SnapshotLink(request, std::make_shared<const Descriptor>(std::move(socket)),
                       std::move(answer.passed), std::move(arena), std::move(hear)));
  link->reader_ = std::thread([raw = link.get()] { raw->Listen(); });
  link->pusher_ = std::thread([raw = link.get()] { raw->Push(); });
  return link;
}

SnapshotLink::SnapshotLink(LinkRequest request, Socket socket, Descriptor memory,
                           std::unique_ptr<ArenaWriter> arena, Hear hear)
    : request_(std::move(request)),
      memory_(std::move(memory)),
      arena_(std::move(arena)),
      hear_(std::move(hear)),
      socket_(std::move(socket)) {
  ours_.assign(shape().chunks, true);
  attempt_of_.assign(shape().chunks, 0);
  for (uint32_t chunk = shape().chunks; chunk > 0; --chunk) free_.push_back(chunk - 1);
}

SnapshotLink::~SnapshotLink() {
  {
    MutexLock lock(mutex_);
    leaving_ = true;
    shutdown(socket_->get(), SHUT_RDWR);
    moved_.NotifyAll();
  }
  if (reader_.joinable()) reader_.join();
  if (pusher_.joinable()) pusher_.join();
}

SnapshotLink::Socket SnapshotLink::socket() const {
  MutexLock lock(mutex_);
  return socket_;
}

bool SnapshotLink::gone() const {
  MutexLock lock(mutex_);
  return state_ == State::kGone;
}

bool SnapshotLink::connected() const {
  MutexLock lock(mutex_);
  return state_ == State::kConnected;
}

void SnapshotLink::Listen() {
  do {
    HearAll();
  } while (WaitForAnother());
  SnapshotMessage last;
  {
    MutexLock lock(mutex_);
    state_ = State::kGone;
    last.text = why_;
    moved_.NotifyAll();
  }
  if (!leaving_) hear_(*this, News::kGone, last);
}

void SnapshotLink::HearAll() {
  const Socket from = socket();
  while (true) {
    const auto incoming = ReceiveSnapshotMessage(from->get());
    if (!incoming || incoming->kind != Incoming::Kind::kMessage) return;
    if (!TakeIn(incoming->message)) return;
    if (incoming->message.word != SnapshotWord::kFree) {
      hear_(*this, News::kSaid, incoming->message);
    }
  }
}

Status SnapshotLink::TakeIn(const SnapshotMessage& message) {
  MutexLock lock(mutex_);
  switch (message.word) {
    case SnapshotWord::kFree:
      if (message.chunk >= ours_.size() || ours_[message.chunk]) {
        return Refuse("the daemon freed a chunk that it does not hold");
      }
      ours_[message.chunk] = true;
      if (message.sequence != 0) said_.Shelve(attempt_of_[message.chunk], message.text);
      (said_.Has(attempt_of_[message.chunk]) ? early_ : free_)
          .push_back(static_cast<uint32_t>(message.chunk));
      moved_.NotifyAll();
      return {};
    case SnapshotWord::kDurable:
    case SnapshotWord::kDropped:
      said_.Settle(message.attempt);
      ReleaseChunks();
      return {};
    default:
      refused_ = true;
      why_ = message.text;
      return {};
  }
}

bool SnapshotLink::WaitForAnother() {
  const auto end = std::chrono::steady_clock::now() + request_.patience;
  {
    MutexLock lock(mutex_);
    if (leaving_ || refused_ || said_.empty()) return false;
    shutdown(socket_->get(), SHUT_RDWR);  // a sender shall not wait
    state_ = State::kAway;
    moved_.NotifyAll();
  }
  hear_(*this, News::kAway, {});
  while (true) {
    (void)ComeBack();
    MutexLock lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (state_ == State::kConnected && !leaving_) return true;
    if (leaving_ || refused_ || said_.empty() || now >= end) return false;
    moved_.WaitUntil(mutex_, std::min(now + kLookPause, end));
  }
}

bool SnapshotLink::BeginReturn(const Interrupted& interrupted) {
  while (true) {
    {
      MutexLock lock(mutex_);
      const auto slice = std::chrono::steady_clock::now() + kSlice;
      while (returning_ && moved_.WaitUntil(mutex_, slice)) {
      }
      if (!std::exchange(returning_, true)) return true;
    }
    if (interrupted && interrupted()) return false;
  }
}

Status SnapshotLink::ComeBack(const Interrupted& interrupted) {
  if (!BeginReturn(interrupted)) return Fail(ErrorCode::kIo, "interrupted");
  Status done = Caught([&] { return Return(interrupted); });
  MutexLock lock(mutex_);
  returning_ = false;
  moved_.NotifyAll();
  return done;
}

Status SnapshotLink::Return(const Interrupted& interrupted) {
  {
    MutexLock lock(mutex_);
    if (state_ == State::kConnected) return {};
    if (state_ == State::kGone || refused_ || leaving_) {
      return Fail(ErrorCode::kNotFound, "the daemon went away");
    }
  }
  CKPT_ASSIGN_OR_RETURN(Descriptor connection, ConnectForSnapshots(request_.store));
  const auto socket = std::make_shared<const Descriptor>(std::move(connection));
  CKPT_RETURN_IF_ERROR(GreetAnother(socket, interrupted));
  {
    MutexLock lock(mutex_);
    if (leaving_) return Fail(ErrorCode::kNotFound, "it leaves");
    while (sending_) moved_.Wait(mutex_);  // to the last one
    said_.Restart();
    Recount();
    state_ = State::kConnected;
    moved_.NotifyAll();
  }
  hear_(*this, News::kBack, {});
  (void)SendAll(Full::kFail);
  return {};
}

Status SnapshotLink::GreetAnother(const Socket& socket, const Interrupted& interrupted) {
  {
    MutexLock lock(mutex_);
    if (leaving_) return Fail(ErrorCode::kNotFound, "it leaves");
    socket_ = socket;  // so that Leave need not wait for an answer
  }
  SnapshotMessage greeting = Greeting(request_, SnapshotWord::kReturn);
  greeting.length = shape().chunk_bytes;
  greeting.sequence = shape().chunks;
  const auto answer = Greet(socket->get(), greeting, memory_.get(), request_.welcome, interrupted);
  if (answer) return {};
  MutexLock lock(mutex_);
  if (answer.error().code == ErrorCode::kPermission) {
    refused_ = true;
    why_ = answer.error().message;
  }
  return Fail(Error(answer.error()));
}

// The next daemon has the chunks that it will be told of, and no others.
void SnapshotLink::Recount() {
  ReleaseChunks();
  std::vector<bool> told(ours_.size(), false);
  for (const uint64_t chunk : said_.Chunks()) told[chunk] = true;
  for (uint32_t chunk = 0; chunk < ours_.size(); ++chunk) {
    if (!ours_[chunk] && !told[chunk]) free_.push_back(chunk);
    ours_[chunk] = !told[chunk];
  }
  early_.clear();
}

void SnapshotLink::ReleaseChunks() {
  const auto over = std::partition(early_.begin(), early_.end(),
                                   [&](uint32_t chunk) { return said_.Has(attempt_of_[chunk]); });
  free_.insert(free_.end(), over, early_.end());
  early_.erase(over, early_.end());
  moved_.NotifyAll();
}

bool SnapshotLink::Fits(uint64_t bytes, uint32_t slots) const {
  return shape().ChunksFor(bytes) <= shape().chunks / slots;
}

std::vector<uint32_t> SnapshotLink::TakeChunks(uint64_t bytes, CondVar::Time end,
                                               const Interrupted& interrupted) {
  const uint64_t count = shape().ChunksFor(bytes);
  while (true) {
    const auto slice = std::min(end, std::chrono::steady_clock::now() + kSlice);
    {
      MutexLock lock(mutex_);
      while (count > free_.size() && state_ != State::kGone && moved_.WaitUntil(mutex_, slice)) {
      }
      if (count <= free_.size()) return TakeFree(count);
      if (state_ == State::kGone || slice == end) return {};
    }
    if (interrupted && interrupted()) return {};
  }
}

bool SnapshotLink::HasRoom(uint64_t bytes) const {
  MutexLock lock(mutex_);
  return shape().ChunksFor(bytes) <= free_.size();
}

std::vector<uint32_t> SnapshotLink::TakeFree(uint64_t count) {
  const auto first = free_.end() - static_cast<ptrdiff_t>(count);
  std::vector<uint32_t> chunks(first, free_.end());
  free_.erase(first, free_.end());
  return chunks;
}

void SnapshotLink::GiveBack(const std::vector<uint32_t>& chunks) {
  MutexLock lock(mutex_);
  free_.insert(free_.end(), chunks.begin(), chunks.end());
  moved_.NotifyAll();
}

Status SnapshotLink::Send(const SnapshotMessage& message) {
  const tl::unexpected<Error> away = Fail(ErrorCode::kIo, "the daemon went away");
  {
    MutexLock lock(mutex_);
    const bool begin = message.word == SnapshotWord::kBegin;
    if (state_ == State::kGone || (begin && state_ == State::kAway)) return away;
    const bool chunk = message.word == SnapshotWord::kChunk;
    if (!said_.Add(message)) {
      if (chunk) free_.push_back(static_cast<uint32_t>(message.chunk));
      return {};
    }
    if (chunk) {  // before it can be freed
      ours_[message.chunk] = false;
      attempt_of_[message.chunk] = message.attempt;
    }
  }
  return SendAll(Full::kFail) || message.word != SnapshotWord::kBegin ? Status() : away;
}

bool SnapshotLink::SendAll(Full full) {
  while (true) {
    Socket to;
    SnapshotMessage message;
    {
      MutexLock lock(mutex_);
      if (sending_) return true;
      const auto next = said_.Next();
      if (!next || state_ != State::kConnected) return true;
      sending_ = true;
      to = socket_;
      message = *next;
    }
    const Status sent = SendSnapshotMessage(to->get(), message, -1, full);
    const bool later = !sent && full == Full::kFail && sent.error().code == ErrorCode::kExhausted;
    if (!sent && !later) shutdown(to->get(), SHUT_RDWR);  // its reader tells
    MutexLock lock(mutex_);
    sending_ = false;
    full_ = later;
    moved_.NotifyAll();
    if (!sent) return later;
    said_.Sent(message.attempt);
    if (message.word == SnapshotWord::kDrop) ReleaseChunks();
  }
}

void SnapshotLink::Push() {
  while (true) {
    {
      MutexLock lock(mutex_);
      while (!full_ && !leaving_ && state_ != State::kGone) moved_.Wait(mutex_);
      if (leaving_ || state_ == State::kGone) return;
      full_ = false;
    }
    (void)SendAll(Full::kWait);
  }
}

}  // namespace ckptfs
