// SPDX-License-Identifier: Apache-2.0
//
// SnapshotLink connects a rank with the daemon: the arena and which of its chunks are free.
// When the daemon dies while steps are not durable the arena stays, and goes to the next
// daemon with all that was said of them.
//
// Thread safety: all methods may be called concurrently.
// Lifetime: the callbacks must outlive it; the destructor joins its threads.
// Units: bytes.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "snapshot/trainer/arena_pinner.h"
#include "snapshot/trainer/said_steps.h"
#include "snapshot/wire/arena.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {

struct LinkRequest {
  std::string store;
  std::string run;
  std::string job;
  uint32_t rank = 0;
  uint32_t world = 1;
  uint64_t bytes = 0;    // of a snapshot
  uint32_t slots = 2;    // snapshots that the arena shall have room for
  uint64_t life = 0;     // a random number of this rank's process
  uint64_t attempt = 0;  // the attempt that it wants to save; 0: none yet
  // For how long an arena waits for another daemon.
  std::chrono::milliseconds patience{600'000};
  // For how long a daemon may take for its answer: it makes the arena.
  std::chrono::milliseconds welcome{60'000};
};

class SnapshotLink {
 public:
  enum class News {
    kSaid,  // the daemon did: durable, dropped
    kAway,  // it went; the arena waits for another
    kBack,  // another has the arena
    kGone,  // nobody will have it; text: why another would not
  };
  // Called by the link's own thread, and with kBack by one that calls ComeBack; neither must
  // let go of the link.
  using Hear = std::function<void(SnapshotLink& from, News news, const SnapshotMessage& said)>;

  // Asked while a daemon or room is waited for, under no lock of the link: true ends that.
  using Interrupted = std::function<bool()>;

  // Connects.  kNotFound if there is no daemon, or the error with which
  // it refuses.  BLOCKS: until it has made the arena, at most `welcome`.
  static Result<std::shared_ptr<SnapshotLink>> Open(const LinkRequest& request, Hear hear,
                                                    const Interrupted& interrupted = {});
  ~SnapshotLink();

  const ArenaShape& shape() const { return arena_->shape(); }
  // True if its arena has room for `slots` snapshots of `bytes`.
  bool Fits(uint64_t bytes, uint32_t slots) const;
  const ArenaWriter& arena() const { return *arena_; }
  bool gone() const;
  bool connected() const;
  // If the daemon is away: hands the arena to another, now.  kNotFound if there is none;
  // kExists while the last one still reads the arena.  BLOCKS: on its answer.
  Status ComeBack(const Interrupted& interrupted = {});

  // Takes free chunks for `bytes` of payload; none if there are too few until
  // `end`, or the link is gone.  BLOCKS: until then at most; not if `end` is over.
  std::vector<uint32_t> TakeChunks(uint64_t bytes, CondVar::Time end,
                                   const Interrupted& interrupted = {});
  // True if there are free chunks for `bytes`.
  bool HasRoom(uint64_t bytes) const;
  // Gives back chunks that were not handed over.
  void GiveBack(const std::vector<uint32_t>& chunks);
  // Keeps what page-locks the arena for devices, as long as this has it.  REQUIRES: once.
  void KeepPinned(std::unique_ptr<ArenaPinner> pinner) {
    kept_pinner_ = std::move(pinner);
    pinner_ = kept_pinner_.get();
  }
  // Null: nothing does.
  ArenaPinner* pinner() const { return pinner_; }
  // Sends a message.  A daemon that does not read for ten seconds is away.  While
  // it is away, a begin fails, and the link sends other messages later.  While it
  // does not read (it is stopped, say), a thread of the link's sends them.
  Status Send(const SnapshotMessage& message);

 private:
  enum class State { kConnected, kAway, kGone };
  using Socket = std::shared_ptr<const Descriptor>;

  SnapshotLink(LinkRequest request, Socket socket, Descriptor memory,
               std::unique_ptr<ArenaWriter> arena, Hear hear);
  void Listen();
  // Hears the daemon until the connection ends.
  void HearAll();
  Status TakeIn(const SnapshotMessage& message);
  // True if another daemon has the arena.
  bool WaitForAnother();
  // One return at a time; false if it was interrupted.
  bool BeginReturn(const Interrupted& interrupted);
  Status Return(const Interrupted& interrupted);
  Status GreetAnother(const Socket& socket, const Interrupted& interrupted);
  // If several threads call, one sends for all.  kFail:
  // leaves to Push what the socket does not take at once.
  bool SendAll(Full full);
  // BLOCKS: on a daemon that does not read, until the link ends.
  void Push();
  std::vector<uint32_t> TakeFree(uint64_t count) EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Recount() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseChunks() EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Socket socket() const;

  const LinkRequest request_;
  const Descriptor memory_;
  const std::unique_ptr<ArenaWriter> arena_;
  std::unique_ptr<ArenaPinner> kept_pinner_;  // ends before the arena goes
  std::atomic<ArenaPinner*> pinner_{nullptr};
  const Hear hear_;
  std::atomic<bool> leaving_{false};
  mutable Mutex mutex_;
  Socket socket_ GUARDED_BY(mutex_);
  State state_ GUARDED_BY(mutex_) = State::kConnected;
  bool refused_ GUARDED_BY(mutex_) = false;  // no daemon will have it
  std::string why_ GUARDED_BY(mutex_);
  bool returning_ GUARDED_BY(mutex_) = false;  // somebody does
  bool sending_ GUARDED_BY(mutex_) = false;    // somebody does
  bool full_ GUARDED_BY(mutex_) = false;       // the socket was
  SaidSteps said_ GUARDED_BY(mutex_);
  std::vector<bool> ours_ GUARDED_BY(mutex_);  // not the daemon's
  std::vector<uint32_t> free_ GUARDED_BY(mutex_);
  std::vector<uint64_t> attempt_of_ GUARDED_BY(mutex_);  // by chunk: handed over for it
  // Came back before what they belong to was over: another daemon would need them.
  std::vector<uint32_t> early_ GUARDED_BY(mutex_);
  CondVar moved_;  // chunks are free, the state, `returning_`, `sending_` or `full_` is another
  std::thread reader_;
  std::thread pusher_;
};

}  // namespace ckptfs
