// SPDX-License-Identifier: Apache-2.0
//
// PeerServer answers what peers ask (peer_protocol.h): it takes their parts onto the shelf, lists,
// describes and sends what lies there.
//
// Thread safety: all methods may be called concurrently.  A thread that accepts, and one for
// each link.
// Lifetime: the destructor closes all links.  The shelf and what `show` uses must outlive it.
// Inputs are hostile: a stranger may say hello and nothing else, within ten seconds; links are
// counted; a link that breaks a rule, or says nothing for long, is closed.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/peer/peer_keys.h"
#include "core/peer/peer_protocol.h"
#include "core/peer/peer_shelf.h"
#include "core/peer/peer_transport.h"

namespace ckptfs {

struct PeerServerOptions {
  PeerIdentity self;
  PeerShelf* shelf = nullptr;
  // Looks what this daemon's mount can show of a run from memory, and shows it.
  std::function<Result<std::vector<ShownMemoryStep>>(const std::string& run)> show = {};
  // The saves of all runs in this daemon's spool.
  std::function<Result<std::vector<PreparedPart>>()> spooled = {};
  std::function<void()> changed = {};  // the shelf has changed
  std::function<void(std::string_view line)> log = {};
  std::chrono::milliseconds greeting = kGreetingTime;
  std::chrono::milliseconds idle = std::chrono::minutes(10);        // between questions
  std::chrono::milliseconds next_chunk = std::chrono::seconds(30);  // of a file that is sent
  size_t max_links = 256;
  size_t max_strangers = 32;  // of those, links that have not proved themselves yet
};

class PeerServer {
 public:
  PeerServer(std::unique_ptr<PeerListener> listener, PeerServerOptions options);
  ~PeerServer();

  std::string address() const { return listener_->address(); }
  uint64_t received_bytes() const { return received_; }
  size_t links() const;

 private:
  enum class Stage { kGreets, kServes, kOver };
  struct Session {
    std::unique_ptr<PeerLink> link;
    std::thread thread;
    std::atomic<Stage> stage{Stage::kGreets};
  };
  void AcceptAll();
  void Begin(std::unique_ptr<PeerLink> link);
  bool HasRoom() const EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reap(bool all);
  void Serve(Session& session);
  Status Answer(PeerLink& link, const PeerFrame& frame);
  Status SaySpooled(PeerLink& link, const std::string& run);
  Status TakeOffer(PeerLink& link, const PeerFrame& frame);
  Status Fill(PeerLink& link, ShelfFile& file);
  Status SendBytes(PeerLink& link, const PeerFrame& frame);
  static Status SayRefused(PeerLink& link, const Error& error);
  static Status Say(PeerLink& link, PeerWord word, std::string text);

  const std::unique_ptr<PeerListener> listener_;
  const PeerServerOptions options_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> received_{0};
  mutable Mutex mutex_;
  std::list<Session> sessions_ GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ckptfs
