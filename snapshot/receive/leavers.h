// SPDX-License-Identifier: Apache-2.0
//
// Leavers are ranks whose connection has ended and whose process may have: one that is killed
// closes its connection a moment before the kernel says that it has ended, and one that closes it
// by itself lives on, and may come again.  However often a process does, it has one descriptor
// here.
//
// Thread safety: none; the receiver's thread.

#pragma once

#include <poll.h>

#include <deque>
#include <vector>

#include "core/base/descriptor.h"
#include "snapshot/landing/job_lives.h"

namespace ckptfs {

class Leavers {
 public:
  // `process`: becomes readable when that has ended.  It is kept for kLeaving at most.  `number`:
  // the process's; nobody else has it while that lives.
  void Add(RankOfJob who, int number, Descriptor process, JobLives::Time now);
  // Returns the ranks whose processes have ended since the last call.
  std::vector<RankOfJob> TakeEnded(JobLives::Time now);
  // Adds the descriptors that become readable when the next process ends.
  void AddTo(std::vector<pollfd>& events) const;

 private:
  static constexpr JobLives::Time kLeaving = std::chrono::seconds(10);
  static constexpr size_t kMostRanks = 4096;  // of one process: the last ones
  struct Leaver {
    int number = 0;
    Descriptor process;
    std::deque<RankOfJob> ranks;
    JobLives::Time since;  // of the last one
    bool HasEnded() const;
  };
  std::vector<Leaver> leavers_;
};

}  // namespace ckptfs
