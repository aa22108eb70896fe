// SPDX-License-Identifier: Apache-2.0

#include "snapshot/snapshot_link.h"

#include <sys/socket.h>
#include <sys/time.h>

#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr timeval kWelcomePatience{60, 0};
constexpr timeval kSendPatience{10, 0};
constexpr timeval kForEver{0, 0};

void SetPatience(int socket, int option, const timeval& patience) {
  setsockopt(socket, SOL_SOCKET, option, &patience, sizeof patience);
}

}  // namespace

Result<std::shared_ptr<SnapshotLink>> SnapshotLink::Open(const LinkRequest& request, Hear hear) {
  CKPT_ASSIGN_OR_RETURN(Descriptor socket, ConnectForSnapshots(request.store));
  SetPatience(socket.get(), SO_RCVTIMEO, kWelcomePatience);
  SetPatience(socket.get(), SO_SNDTIMEO, kSendPatience);
  SnapshotMessage hello{SnapshotWord::kHello};
  hello.rank = request.rank;
  hello.world = request.world;
  hello.length = request.bytes;
  hello.sequence = request.slots;
  hello.text = StrCat(request.run, "\n", request.job);
  CKPT_RETURN_IF_ERROR(SendSnapshotMessage(socket.get(), hello));
  CKPT_ASSIGN_OR_RETURN(Incoming answer, ReceiveSnapshotMessage(socket.get(), true));
  if (answer.kind != Incoming::Kind::kMessage) {
    return Fail(ErrorCode::kIo, "the daemon does not answer");
  }
  if (answer.message.word != SnapshotWord::kWelcome || !answer.passed.valid()) {
    return Fail(ErrorCode::kPermission, StrCat("the daemon refuses: ", answer.message.text));
  }
  ArenaShape shape{answer.message.length, static_cast<uint32_t>(answer.message.sequence)};
  CKPT_ASSIGN_OR_RETURN(auto arena, ArenaWriter::Open(answer.passed.get(), shape));
  SetPatience(socket.get(), SO_RCVTIMEO, kForEver);
  std::shared_ptr<SnapshotLink> link(
      new SnapshotLink(std::move(socket), std::move(arena), std::move(hear)));
  link->reader_ = std::thread([raw = link.get()] { raw->Listen(); });
  return link;
}

SnapshotLink::SnapshotLink(Descriptor socket, std::unique_ptr<ArenaWriter> arena, Hear hear)
    : socket_(std::move(socket)), arena_(std::move(arena)), hear_(std::move(hear)) {
  ours_.assign(shape().chunks, true);
  for (uint32_t chunk = shape().chunks; chunk > 0; --chunk) free_.push_back(chunk - 1);
}

SnapshotLink::~SnapshotLink() {
  leaving_ = true;
  shutdown(socket_.get(), SHUT_RDWR);
  if (reader_.joinable()) reader_.join();
}

void SnapshotLink::Listen() {
  while (true) {
    const auto incoming = ReceiveSnapshotMessage(socket_.get());
    if (!incoming || incoming->kind != Incoming::Kind::kMessage) break;
    const SnapshotMessage& message = incoming->message;
    if (message.word != SnapshotWord::kFree) {
      hear_(*this, &message);
      continue;
    }
    MutexLock lock(mutex_);
    if (message.chunk >= ours_.size() || ours_[message.chunk]) break;  // not the daemon's to free
    ours_[message.chunk] = true;
    free_.push_back(static_cast<uint32_t>(message.chunk));
    freed_.NotifyAll();
  }
  {
    MutexLock lock(mutex_);
    gone_ = true;
    freed_.NotifyAll();
  }
  if (!leaving_) hear_(*this, nullptr);
}

bool SnapshotLink::Fits(uint64_t bytes, uint32_t slots) const {
  return shape().ChunksFor(bytes) <= shape().chunks / slots;
}

std::vector<uint32_t> SnapshotLink::TakeChunks(uint64_t bytes, CondVar::Time end) {
  const uint64_t count = shape().ChunksFor(bytes);
  MutexLock lock(mutex_);
  while (count > free_.size() && !gone_ && freed_.WaitUntil(mutex_, end)) {
  }
  if (count > free_.size()) return {};
  const auto first = free_.end() - static_cast<ptrdiff_t>(count);
  std::vector<uint32_t> chunks(first, free_.end());
  free_.erase(first, free_.end());
  return chunks;
}

void SnapshotLink::GiveBack(const std::vector<uint32_t>& chunks) {
  MutexLock lock(mutex_);
  free_.insert(free_.end(), chunks.begin(), chunks.end());
  freed_.NotifyAll();
}

Status SnapshotLink::Send(const SnapshotMessage& message) {
  if (message.word == SnapshotWord::kChunk) {
    MutexLock lock(mutex_);
    ours_[message.chunk] = false;  // before it can be freed
  }
  Status sent = SendSnapshotMessage(socket_.get(), message);
  if (!sent) {
    gone_ = true;
    shutdown(socket_.get(), SHUT_RDWR);  // its reader tells
  }
  return sent;
}

}  // namespace ckptfs
