// SPDX-License-Identifier: Apache-2.0
//
// SnapshotLink is one connection of a rank to the daemon: the arena and which of its
// chunks are free.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the callbacks must outlive it; the destructor joins its thread.
// Units: bytes.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "snapshot/arena.h"
#include "snapshot/protocol.h"

namespace ckptfs {

struct LinkRequest {
  std::string store;
  std::string run;
  std::string job;
  uint32_t rank = 0;
  uint32_t world = 1;
  uint64_t bytes = 0;  // of a snapshot
  uint32_t slots = 2;  // snapshots that the arena shall have room for
};

class SnapshotLink {
 public:
  // What the daemon says later (durable, dropped); nothing: it is gone.  Called from
  // the link's own thread, which must not let go of the link.
  using Hear = std::function<void(SnapshotLink& from, const SnapshotMessage* message)>;

  // kNotFound if there is no daemon; what it refuses with.  BLOCKS: until it has made
  // the arena, at most a minute.
  static Result<std::shared_ptr<SnapshotLink>> Open(const LinkRequest& request, Hear hear);
  ~SnapshotLink();

  const ArenaShape& shape() const { return arena_->shape(); }
  // Whether its arena has room for `slots` snapshots of `bytes`.
  bool Fits(uint64_t bytes, uint32_t slots) const;
  const ArenaWriter& arena() const { return *arena_; }
  bool gone() const { return gone_; }

  // Free chunks for `bytes` of payload; none if there are too few until `end`, or the
  // daemon went away.  BLOCKS: until then at most; not if `end` is over.
  std::vector<uint32_t> TakeChunks(uint64_t bytes, CondVar::Time end);
  // Chunks that were not handed over.
  void GiveBack(const std::vector<uint32_t>& chunks);
  // Keeps what makes copies into the arena faster (Copier::Pin), as long as this has it.
  // REQUIRES: one thread.
  void KeepPinned(std::shared_ptr<const void> pinned) { pinned_ = std::move(pinned); }
  // BLOCKS: at most ten seconds; who does not read for so long is gone.
  Status Send(const SnapshotMessage& message);

 private:
  SnapshotLink(Descriptor socket, std::unique_ptr<ArenaWriter> arena, Hear hear);
  void Listen();

  const Descriptor socket_;
  const std::unique_ptr<ArenaWriter> arena_;
  std::shared_ptr<const void> pinned_;  // before the arena goes
  const Hear hear_;
  std::atomic<bool> gone_{false};
  std::atomic<bool> leaving_{false};
  Mutex mutex_;
  std::vector<bool> ours_ GUARDED_BY(mutex_);  // not the daemon's
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
  CondVar freed_;  // or the daemon is gone
  std::thread reader_;
};

}  // namespace ckptfs
