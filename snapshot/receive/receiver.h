// SPDX-License-Identifier: Apache-2.0
//
// Receiver is the daemon's end of snapshots.  It listens on the store's
// snapshot socket, gives every rank an arena, puts the ranks' parts together
// and hands whole steps to their keeper, one after the other.  If a
// step's ranks are spread over several machines, it makes its part durable
// (world_parts.h).  One daemon of a store receives; a lock beside the socket
// says which.  It answers only root and the daemon's own user.
//
// Thread safety: all methods may be called concurrently.  Four threads of its own: one
// for the ranks, one for keeping, one for steps that other daemons have ranks of; and one
// that tells the first what lies on the shelf.
// Lifetime: the destructor keeps what is whole and drops the rest; received bytes
// outlive it.
// Units: bytes.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/base/result.h"
#include "core/commit/world_commit.h"
#include "snapshot/landing/received_step.h"
#include "snapshot/landing/spooler.h"
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
  // Makes a step durable.  Called from a thread of the receiver's, one step at a time.
  std::function<Status(ReceivedStep step)> keep;
  // True if an earlier daemon has stored the step that the part is
  // of.  Called as `keep`, and from another thread of the receiver's.
  std::function<Result<bool>(const PartAgain& part)> stored;
  std::function<void(std::string_view line)> log;
  // How steps are made with the ranks of other daemons; null: they are not.  Must outlive
  // the receiver.
  WorldCommit* commit = nullptr;
  std::chrono::milliseconds turn{500};  // between looks at what became of such steps
  // Called from a thread of the receiver's when such a step is durable (`published`:
  // by this daemon), something was written in vain, or another daemon left it.
  std::function<void(const StepRecord& record, bool published)> shown = {};
  std::function<void()> reclaim = {};
  std::shared_ptr<ArenaShelf> shelf = nullptr;  // where arenas outlive the daemon
  // Begins to write a rank's file to the store before it is whole: Store::StreamBlob.  May be
  // empty.
  std::function<std::shared_ptr<BlobStream>(const std::string& path, uint64_t bytes,
                                            std::weak_ptr<const void> owner)>
      stream = {};
  // Where saves may lie until their store has them; null: in memory.  Must outlive the receiver.
  Spooler* spooler = nullptr;
  // Ranks of this daemon have ended their parts of a save, which has a life if several daemons
  // make it.  Returns at once.
  ProtectHook protect = {};
  // A step with a save will be kept.  Returns at once.
  std::function<void(const ReceivedStep& step)> waits = {};
};

class Receiver {
 public:
  // kExists if another daemon receives for this store.
  static Result<std::unique_ptr<Receiver>> Start(ReceiverOptions options);
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // {"ranks", "arena_bytes", "huge_bytes", "full_drops", "full_waits", "incoming",
  //  "waiting", "durable", "dropped", "unproved", "last_durable", "last_drop",
  //  "steps": ["run/7: waiting for ranks 2-3"..]}
  std::string StatusJson() const;

 private:
  struct State;
  explicit Receiver(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ckptfs
