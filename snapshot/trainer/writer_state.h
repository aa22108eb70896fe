// SPDX-License-Identifier: Apache-2.0
//
// The state of a SnapshotWriter: its saves, its daemon, and the
// thread that copies.  A private part of snapshot_writer.cc, writer_copies.cc and writer_links.cc.
//
// Thread safety: `save_mutex` is held through a Save, `copy_mutex` while copies are begun, `mutex`
// never for long; in this order.
// Lifetime: Close ends the thread.

#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/base/digest.h"
#include "core/base/mutex.h"
#include "snapshot/trainer/kept_tensors.h"
#include "snapshot/trainer/save_job.h"
#include "snapshot/trainer/snapshot_link.h"
#include "snapshot/trainer/snapshot_writer.h"

namespace ckptfs {

inline double SecondsSince(SaveJob::Clock::time_point start) {
  return std::chrono::duration<double>(SaveJob::Clock::now() - start).count();
}

struct SnapshotWriter::State {
  using Clock = SaveJob::Clock;
  using JobPtr = std::shared_ptr<SaveJob>;
  using LinkPtr = std::shared_ptr<SnapshotLink>;
  using Interrupted = SnapshotLink::Interrupted;

  explicit State(WriterOptions given);
  void Run();
  bool Begin(Capture capture, Clock::time_point end) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  void SayFull(const SaveJob& job) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Status TakeRoom(SaveJob& job) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Status FollowDevices(SaveJob& job) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  void SayUnproved(const std::string& why);
  void PinArena(SnapshotLink& of, int device);
  void MakeAhead(uint64_t bytes, int device);
  Status AwaitAhead(const Interrupted& asked) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Result<LinkPtr> OpenLink(uint64_t bytes, uint64_t attempt, const Interrupted& asked);
  bool Pace(const SaveJob& job, uint64_t bytes);
  void Abandon(const SaveJob& job, uint64_t step, const std::string& why);
  Status Prepare(SaveJob& job, Capture capture) EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Result<LinkPtr> Connected(uint64_t bytes, const Interrupted& asked)
      EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  Result<LinkPtr> Greet(uint64_t bytes, const Interrupted& asked)
      EXCLUSIVE_LOCKS_REQUIRED(save_mutex);
  void Hear(SnapshotLink& from, SnapshotLink::News news, const SnapshotMessage& said);
  JobPtr Next();
  Status CopyOrSend(const JobPtr& job);
  Status LandCopies(const JobPtr& job);
  bool HasBegun(const SaveJob& job);
  void CopyAhead();
  void Fails(SaveJob& job, const std::string& why);
  Status BeginCopies(SaveJob& job, size_t chunks) EXCLUSIVE_LOCKS_REQUIRED(copy_mutex);
  void EndCopies(SaveJob& job);
  std::optional<std::vector<JobPtr>> ToHold(std::span<const DeviceStream> streams);
  Status SendChunk(SaveJob& job);
  Status Verify(const JobPtr& job);
  void Finish(const JobPtr& job, Status done);

  enum class Fate { kUnderWay, kDurable, kDropped, kLeft };
  struct Outcome {
    uint64_t step = 0;
    Fate fate = Fate::kUnderWay;
    const SnapshotLink* link = nullptr;  // to tell it by
    WriterProgress progress = {};
  };
  // `text`: of kDropped why, of kDurable where its files lie.
  void Settle(uint64_t attempt, Fate fate, const std::string& text) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void CountDrop(const std::string& what, const std::string& why) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Say(std::string line) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  uint64_t NewAttempt(uint64_t step) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  bool HasUnderWay(const SnapshotLink* of) const EXCLUSIVE_LOCKS_REQUIRED(mutex);
  bool AllSafe() const EXCLUSIVE_LOCKS_REQUIRED(mutex);
  // Returns the fate of the newest save of the step.
  std::optional<Fate> FateOf(uint64_t step) const EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const WriterOptions options;
  const pid_t process = getpid();
  const std::unique_ptr<Copier> eager_copier;
  const std::unique_ptr<Copier> lazy_copier;
  const Digest stream;
  const uint64_t life = RandomDigest().low;
  KeptTensors kept;

  Mutex save_mutex;  // one Save at a time; before `mutex`
  LinkPtr link GUARDED_BY(save_mutex);
  // Earlier ones, whose arenas became too small, while their steps are written.
  std::vector<LinkPtr> retired GUARDED_BY(save_mutex);
  Clock::time_point next_greeting GUARDED_BY(save_mutex) = Clock::time_point::min();
  Clock::time_point last_taken GUARDED_BY(save_mutex){};  // a save
  uint64_t silent GUARDED_BY(save_mutex) = 0;             // the door behind which nobody answered

  Mutex copy_mutex;  // SaveJob::begun; who gives copies to lazy_copier that run ahead

  Mutex mutex;
  CondVar moved;  // a job became safe or ended, an outcome settled
  std::deque<JobPtr> jobs GUARDED_BY(mutex);
  std::map<uint64_t, Outcome> outcomes GUARDED_BY(mutex);  // by attempt
  uint64_t last_attempt GUARDED_BY(mutex) = 0;
  WriterStatus status GUARDED_BY(mutex);
  std::vector<std::string> log GUARDED_BY(mutex);
  std::string said GUARDED_BY(mutex);           // the trouble that was said last
  std::string said_unproved GUARDED_BY(mutex);  // why nothing proves what devices' copies are of
  std::string said_unpinned GUARDED_BY(mutex);  // why the arena is not page-locked
  bool said_full GUARDED_BY(mutex) = false;     // SayFull
  bool urgent GUARDED_BY(mutex) = false;        // an update waits for copies
  bool wants_room GUARDED_BY(mutex) = false;    // a save waits for what copies hold
  bool making GUARDED_BY(mutex) = false;        // an arena is being made ahead of the first save
  LinkPtr ready GUARDED_BY(mutex);              // it was made
  bool stopping GUARDED_BY(mutex) = false;
  Clock::time_point next_copy = Clock::time_point::min();  // by pace; the copying thread's
  std::thread thread;
  std::thread maker;  // of an arena; begun under `mutex`
};

}  // namespace ckptfs
