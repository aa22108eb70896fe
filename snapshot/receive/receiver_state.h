// SPDX-License-Identifier: Apache-2.0
//
// The state of a Receiver: its sessions, the steps that come in, and its threads.
// A private part of receiver.cc (the daemon's side), receiver_ranks.cc (the ranks' thread) and
// receiver_nodes.cc (that thread's steps of several daemons).
//
// A turn of the ranks' thread looks at what has happened since the last one: sessions with
// messages, attempts that a part came of, answers.  It looks at all jobs, and at who is late,
// once a second.
//
// Thread safety: members belong to the ranks' thread unless they are guarded or said to be
// another's.
// Lifetime: the Receiver's; its destructor joins the threads.

#pragma once

#include <poll.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/file_lock.h"
#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "snapshot/landing/landing.h"
#include "snapshot/receive/leavers.h"
#include "snapshot/receive/rank_session.h"
#include "snapshot/receive/receiver.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {

inline std::string TitleOf(const AttemptName& name, uint64_t step) {
  return StrCat(name.run, "/", step);
}

struct Receiver::State {
  using Clock = std::chrono::steady_clock;
  using JobName = JobLives::JobName;

  ReceiverOptions options;
  std::string path;
  std::unique_ptr<const FileLock> lock;
  Descriptor listener;
  std::shared_ptr<ArenaBudget> budget = std::make_shared<ArenaBudget>();
  std::atomic<bool> stopping{false};

  // The ranks' thread alone:
  std::vector<std::unique_ptr<RankSession>> sessions;  // by arrival
  std::unordered_map<uint64_t, RankSession*> by_number;
  std::map<JobName, std::set<RankSession*>> of_job;  // those that greeted
  uint64_t last_number = 0;
  std::vector<ArenaMaking> unwanted;  // their ranks left while they were made
  struct Ending {
    std::shared_ptr<std::atomic<bool>> over;
    std::thread thread;
  };
  std::vector<Ending> endings;  // of arenas
  IncomingSteps steps;
  // The ranks that each job has or had here while it is here.
  std::map<JobName, NodeRanks> jobs;
  std::set<AttemptName> unspread;  // could not be handed over while they were looked for
  bool somebody_left = false;      // since jobs were last forgotten
  bool hurries = false;            // there is more to do than this turn did
  bool accepts = true;             // until the next tick it has no descriptors left
  RateLimit arrivals_limit{2000, 2048, Clock::now()};
  Clock::time_point next_tick{};
  uint64_t said_drops = 0;    // since the last tick
  uint64_t unsaid_drops = 0;  // the same
  Leavers leavers;

  mutable Mutex mutex;
  uint64_t incoming GUARDED_BY(mutex) = 0;
  uint64_t ranks GUARDED_BY(mutex) = 0;
  std::map<AttemptName, std::string> incomplete GUARDED_BY(mutex);  // a line of each

  std::thread ranks_thread;
  std::thread shelf_thread;

  // receiver.cc
  Status Listen();
  void Say(std::string_view line) const {
    if (options.log) options.log(line);
  }

  // receiver_ranks.cc
  void Serve();
  // Returns what to wait for; `rests`: somebody is not heard for a moment.
  std::vector<pollfd> Events(bool& rests);
  // Called once a second.
  void Tick();
  void Accept();
  // Sends away the client that has been silent for longest, of the process that has most such.
  void SendStrangerAway();
  // False if it is over.
  bool Turn(RankSession& session, short events, Arrivals& arrivals);
  void Greeted(RankSession& session);
  void Forget(RankSession& session);
  void EndArena(std::shared_ptr<ArenaHold> hold);
  void ReapArenas();
  void UpdateLines(const std::set<AttemptName>& moved);
  void Tell(const AttemptName& name, uint64_t step, SnapshotWord word, const std::string& text,
            uint64_t greetings);
  void TellDrop(const DroppedStep& step);
  void TellNews();

  // receiver_nodes.cc
  void SeeJob(const RankSession& session);
  // Looks at jobs again that have steps waiting: more is known of them, or may be.
  void SeeWorlds();
  void LeaveLives();
  void ForgetJobs();
  // Hands over what has ended of attempts that other daemons have ranks of.
  void Spread(const std::set<AttemptName>& moved);
  void SpreadOne(const AttemptName& name, const Result<JobWorld>& world);
  std::set<uint32_t> Elsewhere(const AttemptName& name) const;
  std::shared_ptr<BlobStream> Stream(PreparedPart part, std::weak_ptr<const void> owner) const;
  void DropElsewhere(const DroppedStep& step);
};

}  // namespace ckptfs
