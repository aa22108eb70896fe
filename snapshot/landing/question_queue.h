// SPDX-License-Identifier: Apache-2.0
//
// QuestionQueue has what ranks asked of earlier saves, each of which is a look into the store.
// Ranks are answered in turn, one question each.  Looks take a quarter of a thread's time at
// most, so that saves go on beside a client that asks without end.
//
// Thread safety: none.
// Units: times as they are given.

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "snapshot/landing/received_step.h"

namespace ckptfs {

class QuestionQueue {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  explicit QuestionQueue(Time now) : counted_(now) {}
  void Add(PartAgain question);
  // Forgets an asker's questions about saves that are over, and returns these: nobody else waits
  // for the answers.
  std::vector<AttemptName> ForgetOver(uint64_t asker);
  bool empty() const { return order_.empty(); }
  // Returns when the next question may be looked for; now or earlier: at once.  REQUIRES: !empty().
  Time Due(Time now);
  // Takes the first question of the asker whose turn it is; nothing before Due.
  std::optional<PartAgain> Next(Time now);
  // Notes how long a look took.
  void Spent(Clock::duration time) { credit_ -= time; }

 private:
  static constexpr int kShare = 4;  // one part in so many
  static constexpr Clock::duration kMostCredit = std::chrono::milliseconds(50);
  void Count(Time now);

  std::map<uint64_t, std::deque<PartAgain>> of_;  // by asker
  std::deque<uint64_t> order_;                    // askers with questions, each once
  Time counted_;                                  // up to when the credit was counted
  Clock::duration credit_ = kMostCredit;
};

}  // namespace ckptfs
