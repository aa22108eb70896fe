// SPDX-License-Identifier: Apache-2.0
//
// Receiver is the daemon's end of snapshots.  It listens on the store's
// snapshot socket, gives every rank an arena, puts the ranks' parts together, hands them to their
// Landing when this machine's are all here, and tells the ranks what became of them.  One daemon of
// a store receives; a lock beside the socket says which.  It answers only root and the daemon's own
// user.
//
// Thread safety: all methods may be called concurrently.  Two threads of its own: one for the
// ranks, and one that tells it what lies on the shelf.
// Lifetime: the destructor keeps what is whole and drops the rest; received bytes
// outlive it.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "snapshot/landing/landing.h"
#include "snapshot/receive/rank_session.h"
#include "snapshot/wire/arena.h"

namespace ckptfs {

struct ReceiverOptions {
  std::string store;          // absolute
  uint64_t memory_bytes = 0;  // of all arenas together
  uint64_t chunk_bytes = kArenaChunkBytes;
  std::chrono::milliseconds patience{600'000};  // for the ranks of one step
  size_t max_sessions = 1024;                   // that said hello
  std::chrono::milliseconds hello{10'000};      // a client is sent away that says none for so long
  // Has the saves from the last rank's part on; begun and finished by the receiver.  Must outlive
  // it.
  Landing* landing = nullptr;
  std::function<void(std::string_view line)> log = {};
  std::shared_ptr<ArenaShelf> shelf = nullptr;  // where arenas outlive the daemon
};

struct ReceiverStatus {
  uint64_t ranks = 0;
  uint64_t arena_bytes = 0;
  uint64_t arena_limit_bytes = 0;
  uint64_t huge_bytes = 0;
  uint64_t full_drops = 0;
  uint64_t full_waits = 0;
  uint64_t incoming = 0;  // steps that wait for ranks
  LandingStatus saves = {};
  // "run/7: waiting for ranks 2-3", for each that waits, of this machine's ranks and others.
  std::vector<std::string> steps = {};
};

class Receiver {
 public:
  // kExists if another daemon receives for this store.
  static Result<std::unique_ptr<Receiver>> Start(ReceiverOptions options);
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  ReceiverStatus status() const;

 private:
  struct State;
  explicit Receiver(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
