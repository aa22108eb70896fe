// SPDX-License-Identifier: Apache-2.0
//
// PeerPool is a daemon's links to its peers: who they are, which of them answer, and a link that
// is free for who asks.  A peer that does not answer is left alone for a while, and costs
// one line.
//
// Thread safety: all methods may be called concurrently; no lock is held while a peer is asked.
// Lifetime: shared by who reads from peers.
// Units: bytes; a rate is bytes a second.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/peer/memory_attempts.h"
#include "core/peer/peer_client.h"
#include "core/peer/peer_records.h"

namespace ckptfs {

struct PeerPoolStatus {
  struct Peer {
    PeerRecord record;
    std::string link;
    uint64_t sent_bytes = 0;
    uint64_t rate = 0;  // of the last file
    std::string away;   // why; empty: it answers
  };
  std::vector<Peer> peers;
};

class PeerPool {
 public:
  using ClientPtr = std::unique_ptr<PeerClient>;
  PeerPool(std::shared_ptr<PeerTransport> transport, PeerIdentity self,
           std::function<void(std::string_view line)> log,
           std::chrono::milliseconds pause = std::chrono::seconds(5));

  // The peers are these from now on; this daemon's own record is left out.
  void Set(const std::vector<PeerRecord>& peers);
  // Those that answered when they were last asked, or were not asked yet.
  std::vector<PeerRecord> present() const;
  // Peers that did not answer when they were last asked.
  std::vector<PeerRecord> away() const;

  // Asks a peer: `ask` is called with a link to it.  kIo at once if it did not answer lately;
  // kNotFound if it is not a peer.  BLOCKS: on the network.
  Status Ask(const Digest& node, const std::function<Status(PeerClient& client)>& ask);
  // Lists the shelves of all peers that answer, asked at once.  BLOCKS: on the slowest.
  PeerShelves ListAll();

  // Ends all questions, and refuses new ones, until Resume.
  void Stop();
  void Resume();

  // Notes that so many bytes were sent to a peer in that time.
  void Sent(const Digest& node, uint64_t bytes, std::chrono::nanoseconds time);
  PeerPoolStatus status() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    PeerRecord record;
    std::vector<ClientPtr> idle;
    std::string why_away;     // empty: it answers
    Clock::time_point again;  // when it is tried again
    std::string about;        // the last link
    uint64_t sent = 0;
    uint64_t rate = 0;
  };
  struct Link {
    ClientPtr client;
    bool idle = false;  // it was used before
  };
  enum class State { kAsks, kStopped };
  Result<Link> Take(const Digest& node);
  Result<Link> TakeIdle(const Digest& node, std::string& address);
  // Keeps the link of who asks for Stop; kIo if that has been called.
  Status Use(PeerClient& client);
  void Unuse(PeerClient& client);
  void Return(const Digest& node, ClientPtr client);
  void Away(const Digest& node, const Error& why);

  const std::shared_ptr<PeerTransport> transport_;
  const PeerIdentity self_;
  const std::function<void(std::string_view)> log_;
  const std::chrono::milliseconds pause_;
  mutable Mutex mutex_;
  std::map<Digest, Peer> peers_ GUARDED_BY(mutex_);
  std::set<PeerClient*> busy_ GUARDED_BY(mutex_);
  State state_ GUARDED_BY(mutex_) = State::kAsks;
};

}  // namespace ckptfs
