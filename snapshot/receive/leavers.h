// SPDX-License-Identifier: Apache-2.0
//
// Leavers are ranks whose connection has ended and whose process may have: one that is killed
// closes its connection a moment before the kernel says that it has ended, and one that closes it
// by itself lives on, and may come again.
//
// Thread safety: none; the receiver's thread.

#pragma once

#include <poll.h>

#include <vector>

#include "core/base/descriptor.h"
#include "snapshot/landing/job_lives.h"

namespace ckptfs {

class Leavers {
 public:
  // `process`: becomes readable when that has ended.  It is kept for kLeaving at most.
  void Add(RankOfJob who, Descriptor process, JobLives::Time now);
  // Returns the ranks whose processes have ended since the last call.
  std::vector<RankOfJob> TakeEnded(JobLives::Time now);
  // Adds the descriptors that become readable when the next process ends.
  void AddTo(std::vector<pollfd>& events) const;

 private:
  static constexpr JobLives::Time kLeaving = std::chrono::seconds(10);
  struct Leaver {
    RankOfJob who;
    Descriptor process;
    JobLives::Time since;
  };
  std::vector<Leaver> leavers_;
};

}  // namespace ckptfs
