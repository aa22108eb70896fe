// SPDX-License-Identifier: Apache-2.0
//
// RankSession is the daemon's end of one rank's conversation (protocol.h).  It believes
// nothing: every number is checked before it is used, and a message out of turn ends
// it.
//
// Thread safety: none; the receiver's thread.
// Lifetime: what it received outlives it.
// Units: bytes.

#pragma once

#include <atomic>
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
#include "snapshot/wire/arena.h"
#include "snapshot/receive/arena_shelf.h"
#include "snapshot/wire/protocol.h"
#include "snapshot/landing/received_step.h"

namespace ckptfs {

// Counts the memory of all sessions, and wakes those that wait when chunks come back.
struct ArenaBudget {
  uint64_t limit = 0;
  uint64_t chunk_bytes = kArenaChunkBytes;
  std::atomic<uint64_t> used{0};
  std::atomic<uint64_t> huge{0};  // of it in huge pages
  // Snapshots that met a full arena: how often ranks dropped theirs, or waited.
  std::atomic<uint64_t> full_drops{0};
  std::atomic<uint64_t> full_waits{0};
  Descriptor wake;                // an eventfd
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
  // `place`: where a disk has what they hold; empty: nowhere, or it is over.
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
  Mutex mutex_;
  std::vector<Returned> returned_ GUARDED_BY(mutex_);
};

// A part of a step that was handed over before, to another daemon.
struct PartAgain {
  AttemptName name;
  uint64_t step = 0;
  uint32_t rank = 0;
  uint32_t world = 0;
  ReceivedFile file;  // without its bytes
  bool over = false;  // this daemon has had it already: the step is stored or dropped
  std::string place = {};  // the rank asks about what lay there, and nothing else
};

// The steps and parts that ranks have handed over by now.
struct Arrivals {
  std::vector<ReceivedStep> whole;  // the last part has come
  std::vector<PartAgain> again;     // of steps that are not whole yet
};

class RankSession {
 public:
  RankSession(Descriptor socket, std::shared_ptr<ArenaBudget> budget);
  ~RankSession();

  int socket() const { return socket_.get(); }
  // Becomes readable when the rank's process has ended, whoever else has its socket; may be -1.
  int process() const { return process_.get(); }
  const std::string& run() const { return run_; }
  const std::string& job() const { return job_; }
  uint32_t rank() const { return rank_; }
  uint32_t world() const { return world_; }
  uint64_t life() const { return life_; }
  uint64_t greeting() const { return greeting_; }  // IncomingSteps::greetings, with it
  bool introduced() const { return world_ != 0; }
  bool wants_to_write() const { return !outbox_.empty(); }

  // Reads what is there; false when the rank has left.
  Result<bool> Receive(IncomingSteps& steps, Arrivals& arrivals);
  // Says what became of an arena that is being made, frees chunks, sends what is waiting.
  Status Advance();
  // Returns the rank that has left, and its process; nothing if that is not known, or no rank was
  // taken in.
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
  Status Chunk(const SnapshotMessage& message);
  Status CheckHeader(const ChunkHeader& header, const Part& part) const;
  Status End(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals);
  Status Ask(const SnapshotMessage& message, IncomingSteps& steps, Arrivals& arrivals) const;
  Status Welcome();
  SnapshotMessage Greeting() const;
  AttemptName NameOf(uint64_t attempt) const { return {run_, job_, attempt}; }

  const Descriptor socket_;
  Descriptor process_;
  const std::shared_ptr<ArenaBudget> budget_;
  std::string run_;
  std::string job_;
  uint32_t rank_ = 0;
  uint32_t world_ = 0;  // 0: no hello yet
  uint64_t life_ = 0;
  uint64_t greeting_ = 0;
  RankOfJob asked_;        // the rank that said hello, welcome or not
  uint64_t attempt_ = 0;   // the attempt that it wants to save
  bool back_ = false;
  bool for_another_ = false;
  JobLives::Time seen_{0};
  ArenaShape shape_;
  std::future<Result<ArenaMemory>> making_;
  std::thread maker_;
  std::shared_ptr<ArenaHold> hold_;
  std::vector<bool> ours_;                           // chunks that the rank has handed over
  std::map<uint64_t, std::unique_ptr<Part>> parts_;  // by attempt
  std::deque<SnapshotMessage> outbox_;
  bool deaf_ = false;  // it hears nothing any more; what it said before is read all the same
};

}  // namespace ckptfs
