// SPDX-License-Identifier: Apache-2.0
//
// RetryRule says when an action that failed is tried again, and when it is given up: the one rule
// for the store, for several daemons' commits and for the spool.
//
// Thread safety: none; whoever advances what is tried.
// Units: times of the steady clock.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace ckptfs {

// How often one action was tried, and when it is next.
struct Tries {
  using Clock = std::chrono::steady_clock;
  Clock::time_point begun = Clock::now();
  Clock::time_point due = {};
  Clock::duration pause = {};
  uint64_t failed = 0;
  uint64_t at_end = 0;  // of them, since the daemon ends
};

struct RetryRule {
  using Clock = Tries::Clock;
  std::chrono::milliseconds pause{500};  // before the second try; twice as long each time
  std::chrono::milliseconds most{4'000};
  std::chrono::milliseconds limit{600'000};  // since the first try

  // How long it may take.
  enum class Patience {
    kLimited,   // no longer than `limit`: it takes up memory
    kForEver,   // its bytes are safe elsewhere
    kOnceMore,  // the daemon ends: one more try, at once
  };

  // Notes a failure.  False if it is not tried again.
  bool Again(Tries& tries, Clock::time_point now, Patience patience) const {
    ++tries.failed;
    if (patience == Patience::kOnceMore) {
      tries.due = now;
      return ++tries.at_end < 2;
    }
    if (patience == Patience::kLimited && now - tries.begun >= limit) return false;
    tries.pause =
        tries.pause == Clock::duration::zero()
            ? Clock::duration(pause)
            : std::min(2 * tries.pause, std::max(Clock::duration(pause), Clock::duration(most)));
    tries.due = now + tries.pause;
    return true;
  }
};

}  // namespace ckptfs
