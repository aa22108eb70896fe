// SPDX-License-Identifier: Apache-2.0
//
// RankSession is the daemon's end of one rank's conversation (protocol.h).  It believes
// nothing: every number is checked before it is used, and a message out of turn ends it.
//
// Thread safety: none; the receiver's thread.
// Lifetime: what it received outlives it.
// Units: bytes.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/result.h"
#include "core/blob/chunk_digests.h"
#include "core/store/blob_stream.h"
#include "snapshot/landing/received_step.h"
#include "snapshot/receive/arena_shelf.h"
#include "snapshot/receive/rank_counts.h"
#include "snapshot/receive/rate_limit.h"
#include "snapshot/wire/arena.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {

// How the memory of all sessions is counted, and who is woken when chunks come back.
struct ArenaBudget {
  uint64_t limit = 0;
  uint64_t chunk_bytes = kArenaChunkBytes;
  std::atomic<uint64_t> used{0};
  std::atomic<uint64_t> huge{0};  // of it in huge pages
  // Snapshots that met a full arena: how often ranks dropped theirs, or waited.
  std::atomic<uint64_t> full_drops{0};
  std::atomic<uint64_t> full_waits{0};
  std::atomic<uint64_t> ending{0};  // of what is used: goes back soon
  RankCounts ranks{};
  Descriptor wake;                    // an eventfd
  std::shared_ptr<ArenaShelf> shelf;  // null: arenas end with the daemon
  // The file of `part`'s one rank, written while it comes in; null where it is not.  May be empty.
  std::function<std::shared_ptr<BlobStream>(PreparedPart part, std::weak_ptr<const void> owner)>
      stream;

  void Wake() const;
};

// An arena and the chunks that nobody reads any more.
class ArenaHold {
 public:
  // OWNERSHIP: the budget has counted the memory, this gives it back.
  // `claim`: ClaimArena's, or null.
  ArenaHold(std::unique_ptr<ArenaReader> reader, std::unique_ptr<const FileLock> claim,
            std::shared_ptr<ShelfPlace> place, uint64_t huge, std::shared_ptr<ArenaBudget> budget);
  ~ArenaHold();
  const ArenaReader& reader() const { return *reader_; }
  // Attempts that have chunks of it.
  void Begin() { ++attempts_; }
  size_t attempts() const { return attempts_; }
  // `place`: where a disk has what they hold; empty: nowhere, or it is over.  Ends what Begin
  // began.
  void Return(const std::vector<uint32_t>& chunks, const std::string& place);
  struct Returned {
    uint32_t chunk = 0;
    std::string place;
  };
  std::vector<Returned> TakeReturned();
  // Null where it is not kept.
  ShelfPlace* place() const { return place_.get(); }
  // The rank has left: its memory goes with this, whoever has a descriptor of it still
  // (a process that was forked).
  void LetGo() { left_ = true; }

 private:
  const std::unique_ptr<const FileLock> claim_;
  const std::shared_ptr<ShelfPlace> place_;
  const std::unique_ptr<ArenaReader> reader_;
  const uint64_t huge_;
  const std::shared_ptr<ArenaBudget> budget_;
  std::atomic<bool> left_{false};
  std::atomic<size_t> attempts_{0};
  Mutex mutex_;
  std::vector<Returned> returned_ GUARDED_BY(mutex_);
};

// The steps and parts that ranks have handed over by now.
struct Arrivals {
  std::vector<ReceivedStep> whole;  // the last part has come
  std::vector<PartAgain> again;     // of steps that are not whole yet
};

// An arena that is being made, by a thread of its own; the budget has counted it.
struct ArenaMaking {
  ArenaShape shape;
  std::shared_ptr<std::atomic<bool>> ends = {};  // true: it is not wanted any more
  std::future<Result<ArenaMemory>> made = {};
  std::thread thread = {};

  bool Ready() const { return made.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
};

class RankSession {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `number`: no other session's.
  RankSession(Descriptor socket, uint64_t number, Time now, std::shared_ptr<ArenaBudget> budget);

  int socket() const { return socket_.get(); }
  uint64_t number() const { return number_; }
  Time began() const { return began_; }
  // The client's process as the daemon sees it; 0: it cannot.
  int peer() const { return peer_; }
  // Becomes readable when the rank's process has ended, whoever else has its socket; may be -1.
  int process() const { return process_.get(); }
  const std::string& run() const { return run_; }
  const std::string& job() const { return job_; }
  uint32_t rank() const { return rank_; }
  uint32_t world() const { return world_; }
  uint64_t life() const { return life_; }
  uint64_t greeting() const { return greeting_; }  // IncomingSteps::greetings, with it
  bool introduced() const { return world_ != 0; }
  bool greets() const { return introduced() || hello_; }
  bool wants_to_write() const { return !outbox_.empty(); }
  // False while its client leaves answers unread, or waits for answers to as many questions as one
  // may ask: then nothing is read but from a client that has gone.
  bool wants_to_read() const;
  // Notes that time has passed.  False if it has said so much that it is not heard for a moment.
  bool Pass(Time now);
  // Notes that a question of its was looked for.
  void Answered() { questions_ -= questions_ > 0 ? 1 : 0; }

  // Reads what is there, some of it if it is much; false when the rank has left.
  Result<bool> Receive(IncomingSteps& steps, Arrivals& arrivals);
  // Says what became of an arena that is being made, frees chunks, sends what is waiting.
  Status Advance(IncomingSteps& steps);
  // Takes the arena that is being made for a rank that has left: whoever has it waits for its
  // thread, and gives the memory back to the budget.
  std::optional<ArenaMaking> TakeMaking() { return std::exchange(making_, std::nullopt); }
  // Takes the arena of a rank that has left, unless somebody reads it still; else null.
  std::shared_ptr<ArenaHold> TakeHold();
  // Returns who has left, and its process; nothing if that is not known, or nobody was taken in.
  std::optional<std::pair<RankOfJob, Descriptor>> Left();
  // Not before the welcome, which answers the hello.
  void Say(SnapshotMessage message) {
    if (hold_ && !deaf_) outbox_.push_back(std::move(message));
  }
  // Notes that the rank's process was there at that time.
  void Saw(JobLives::Time now) { seen_ = now; }
  // Refuses the rank for want of memory: the others of its job are told.
  void Refuse(IncomingSteps& steps, const std::string& why) const;
  // Ends the session: what is not whole is dropped.
  void Leave(IncomingSteps& steps, const std::string& why);

 private:
  struct Part;  // of one attempt, while it comes in
  Status Handle(Incoming incoming, IncomingSteps& steps, Arrivals& arrivals);
  Status HandlePart(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals);
  void Forgo(uint64_t attempt);
  // The run, the job and the rank, which are nobody's yet.
  Status CheckGreeting(const SnapshotMessage& message) const;
  // REQUIRES: it was checked.
  static RankOfJob WhoSays(const SnapshotMessage& message);
  // Errors as of JobLives::Greet.
  Status Introduce(const SnapshotMessage& message, IncomingSteps& steps);
  JobLives::Comes how() const;
  // Counts the memory of shape_.
  Status Charge();
  Status Hello(const SnapshotMessage& message, IncomingSteps& steps);
  Status Return(const SnapshotMessage& message, const Descriptor& memory, IncomingSteps& steps);
  Status Begin(const SnapshotMessage& message, IncomingSteps& steps);
  std::shared_ptr<BlobStream> Stream(const SnapshotMessage& begin, IncomingSteps& steps,
                                     std::weak_ptr<const void> owner) const;
  // Returns the bytes of the chunk.
  Result<uint64_t> Chunk(const SnapshotMessage& message);
  Status CheckHeader(const ChunkHeader& header, const Part& part) const;
  Status End(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals);
  Status Ask(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals);
  void Question(PartAgain part, Arrivals& arrivals);
  Status Welcome();
  SnapshotMessage Greeting() const;
  AttemptName NameOf(uint64_t attempt) const { return {run_, job_, attempt}; }

  const Descriptor socket_;
  const uint64_t number_;
  const Time began_;
  const int peer_;
  Descriptor process_;
  const std::shared_ptr<ArenaBudget> budget_;
  std::string run_;
  std::string job_;
  uint32_t rank_ = 0;
  uint32_t world_ = 0;  // 0: no hello yet
  uint64_t life_ = 0;
  uint64_t greeting_ = 0;
  RankOfJob asked_;                       // who said hello, welcome or not
  uint64_t attempt_ = 0;                  // what it wants to save
  std::optional<SnapshotMessage> hello_;  // that waits until memory which is ending is back
  bool back_ = false;
  bool for_another_ = false;
  JobLives::Time seen_{0};
  ArenaShape shape_;
  std::optional<ArenaMaking> making_;
  std::shared_ptr<ArenaHold> hold_;
  std::vector<bool> ours_;                           // chunks that the rank has handed over
  std::map<uint64_t, std::unique_ptr<Part>> parts_;  // by attempt
  std::deque<SnapshotMessage> outbox_;
  uint64_t taken_bytes_ = 0;  // of chunks, in this Receive
  RateLimit messages_;
  size_t questions_ = 0;  // that were not looked for
  bool deaf_ = false;     // it hears nothing any more; what it said before is read all the same
};

}  // namespace ckptfs
