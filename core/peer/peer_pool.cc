// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_pool.h"

#include <algorithm>
#include <system_error>
#include <thread>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kIdleLinks = 4;  // a peer
constexpr size_t kAskers = 16;    // threads that ask all peers

}  // namespace

PeerPool::PeerPool(std::shared_ptr<PeerTransport> transport, PeerIdentity self,
                   std::function<void(std::string_view)> log, std::chrono::milliseconds pause)
    : transport_(std::move(transport)), self_(self), log_(std::move(log)), pause_(pause) {}

void PeerPool::Set(const std::vector<PeerRecord>& peers) {
  std::map<Digest, Peer> gone;  // its links are closed outside of the lock
  MutexLock lock(mutex_);
  gone.swap(peers_);
  for (const PeerRecord& record : peers) {
    if (record.node == self_.node) continue;
    auto known = gone.extract(record.node);
    if (known.empty() || known.mapped().record != record) {
      peers_[record.node].record = record;
    } else {
      peers_.insert(std::move(known));
    }
  }
}

std::vector<PeerRecord> PeerPool::present() const {
  MutexLock lock(mutex_);
  std::vector<PeerRecord> found;
  for (const auto& [node, peer] : peers_) {
    if (peer.why_away.empty()) found.push_back(peer.record);
  }
  return found;
}

std::vector<PeerRecord> PeerPool::away() const {
  MutexLock lock(mutex_);
  std::vector<PeerRecord> found;
  for (const auto& [node, peer] : peers_) {
    if (!peer.why_away.empty()) found.push_back(peer.record);
  }
  return found;
}

// A link without a client: one has to be made to that address.
Result<PeerPool::Link> PeerPool::TakeIdle(const Digest& node, std::string& address) {
  MutexLock lock(mutex_);
  if (state_ == State::kStopped) return Fail(ErrorCode::kIo, "the daemon is ending");
  const auto found = peers_.find(node);
  if (found == peers_.end()) return Fail(ErrorCode::kNotFound, "it is not a peer any more");
  Peer& peer = found->second;
  if (!peer.why_away.empty() && Clock::now() < peer.again) {
    return Fail(ErrorCode::kIo, peer.why_away);
  }
  address = peer.record.address;
  if (peer.idle.empty()) return Link{};
  Link link{std::move(peer.idle.back()), true};
  peer.idle.pop_back();
  return link;
}

Result<PeerPool::Link> PeerPool::Take(const Digest& node) {
  std::string address;
  CKPT_ASSIGN_OR_RETURN(Link link, TakeIdle(node, address));
  if (link.client) return link;
  auto client = PeerClient::Connect(*transport_, address, node, self_);
  if (!client) {
    Away(node, client.error());
    return Fail(std::move(client).error());
  }
  return Link{*std::move(client), false};
}

Status PeerPool::Use(PeerClient& client) {
  MutexLock lock(mutex_);
  if (state_ == State::kStopped) return Fail(ErrorCode::kIo, "the daemon is ending");
  busy_.insert(&client);
  return {};
}

void PeerPool::Unuse(PeerClient& client) {
  MutexLock lock(mutex_);
  busy_.erase(&client);
}

void PeerPool::Stop() {
  std::vector<ClientPtr> idle;  // closed outside of the lock
  MutexLock lock(mutex_);
  state_ = State::kStopped;
  for (PeerClient* const client : busy_) client->Close();
  for (auto& [node, peer] : peers_) {
    for (ClientPtr& client : peer.idle) idle.push_back(std::move(client));
    peer.idle.clear();
  }
}

void PeerPool::Resume() {
  MutexLock lock(mutex_);
  state_ = State::kAsks;
}

void PeerPool::Return(const Digest& node, ClientPtr client) {
  std::string line;
  {
    MutexLock lock(mutex_);
    const auto found = peers_.find(node);
    if (found == peers_.end()) return;
    Peer& peer = found->second;
    peer.about = client->about();
    if (!peer.why_away.empty())
      line = StrCat("peer ", peer.record.host, " (", peer.record.address, ") answers again");
    peer.why_away.clear();
    if (state_ == State::kAsks && peer.idle.size() < kIdleLinks)
      peer.idle.push_back(std::move(client));
  }
  if (!line.empty() && log_) log_(line);
}

void PeerPool::Away(const Digest& node, const Error& why) {
  std::string line;
  std::vector<ClientPtr> links;
  {
    MutexLock lock(mutex_);
    const auto found = peers_.find(node);
    if (found == peers_.end()) return;
    if (state_ == State::kStopped) return;  // its link was closed here
    Peer& peer = found->second;
    if (peer.why_away.empty())
      line = StrCat("peer ", peer.record.host, " (", peer.record.address,
                    ") does not answer: ", why.message);
    peer.why_away = why.message;
    peer.again = Clock::now() + pause_;
    links.swap(peer.idle);
  }
  if (!line.empty() && log_) log_(line);
}

Status PeerPool::Ask(const Digest& node, const std::function<Status(PeerClient& client)>& ask) {
  for (;;) {
    CKPT_ASSIGN_OR_RETURN(Link link, Take(node));
    CKPT_RETURN_IF_ERROR(Use(*link.client));
    const auto unuse = [this](PeerClient* client) { Unuse(*client); };
    std::unique_ptr<PeerClient, decltype(unuse)> busy(link.client.get(), unuse);
    Status asked = ask(*link.client);
    busy.reset();
    if (!link.client->broken()) {
      Return(node, std::move(link.client));
      return asked;
    }
    // It may have been closed while nobody used it.
    if (link.idle && !asked && asked.error().code == ErrorCode::kNotFound) continue;
    Away(node, asked ? Error{ErrorCode::kIo, "its link broke"} : asked.error());
    return asked;
  }
}

PeerShelves PeerPool::ListAll() {
  std::vector<Digest> nodes;
  {
    MutexLock lock(mutex_);
    for (const auto& [node, peer] : peers_) nodes.push_back(node);
  }
  PeerShelves shelves;
  Mutex mutex;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < nodes.size(); i = next++) {
      std::vector<ShelvedPart> parts;
      const Status asked = Ask(nodes[i], [&](PeerClient& client) -> Status {
        CKPT_ASSIGN_OR_RETURN(parts, client.List());
        return {};
      });
      if (!asked) continue;
      MutexLock lock(mutex);
      shelves[nodes[i]] = std::move(parts);
    }
  };
  std::vector<std::thread> threads;
  try {
    for (size_t i = 1; i < std::min(nodes.size(), kAskers); ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Those that did start ask all.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return shelves;
}

void PeerPool::Sent(const Digest& node, uint64_t bytes, std::chrono::nanoseconds time) {
  MutexLock lock(mutex_);
  const auto found = peers_.find(node);
  if (found == peers_.end()) return;
  found->second.sent += bytes;
  const double seconds = static_cast<double>(std::max<int64_t>(time.count(), 1)) / 1e9;
  found->second.rate = static_cast<uint64_t>(static_cast<double>(bytes) / seconds);
}

PeerPoolStatus PeerPool::status() const {
  MutexLock lock(mutex_);
  PeerPoolStatus status;
  for (const auto& [node, peer] : peers_) {
    status.peers.push_back({peer.record, peer.about, peer.sent, peer.rate, peer.why_away});
  }
  return status;
}

}  // namespace ckptfs
