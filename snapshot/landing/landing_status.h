// SPDX-License-Identifier: Apache-2.0
//
// LandingStatus is what a Landing says of itself: how many saves became what, and how long it took.
//
// Thread safety: a value.
// Units: seconds, or nanoseconds since 1970 where the name says so.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ckptfs {

struct LandingStatus {
  uint64_t waiting = 0;  // for the store, of those of which all ranks are here
  uint64_t durable = 0;
  uint64_t dropped = 0;  // those that never were whole, too
  struct Drops {
    uint64_t incomplete = 0;  // never whole
    uint64_t refused = 0;     // not a step, or others dropped it
    uint64_t exhausted = 0;   // the store had no room for too long
    uint64_t failed = 0;      // the store failed for too long, or others did not come
  };
  Drops dropped_for = {};             // of `dropped`
  double durable_seconds = 0;         // of all durable ones, from the first part on
  int64_t last_durable_ns = 0;        // since 1970; 0: none was
  double oldest_waiting_seconds = 0;  // of those that are not durable; 0: none waits
  uint64_t unproved = 0;
  std::string last_durable;
  std::string last_drop;
  // "run/7: No space left on device": why the store did not take a save that waits for it; empty
  // once it has taken one.
  std::string last_failure;
  // "run/7: waiting for ranks 2-3", for each of which other daemons have ranks.
  std::vector<std::string> steps;
};

}  // namespace ckptfs
