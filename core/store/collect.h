// SPDX-License-Identifier: Apache-2.0
//
// CollectRequest and CollectReport: the arguments and the results of Store::Collect.
//
// Thread safety: values.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/store/store.h"

namespace ckptfs {

// Says which steps go.  Only steps whose bytes the store owns can go.  A run keeps the newest
// `keep_last` among them, and one at least (NewestOf: the newest life's first, then those of the
// life before).  It also keeps those of every life whose iteration is a multiple of `keep_every`.
// All stay if neither number is given.  Nobody removes steps here that refer to files elsewhere.
struct CollectRequest {
  std::optional<std::string> run;  // of this run only; absent: of every one
  uint64_t keep_last = 0;
  uint64_t keep_every = 0;
  bool dry_run = false;  // nothing is removed: what would be is told
  // Before a step is found to be held: who only keeps it at hand lets go of it.
  std::function<void(const StepRecord&)> let_go;
};

struct CollectReport {
  std::vector<StepRecord> removed;
  std::vector<StepRecord> held;  // would have gone, but somebody uses them
  uint64_t manifests = 0;        // reclaimed, with those of the steps removed now
  uint64_t directories = 0;      // of blobs
  uint64_t bytes = 0;
  uint64_t busy = 0;     // manifests and directories that somebody holds: not reclaimed now
  uint64_t records = 0;  // of daemons that are gone (core/store/prepared_sweep.h)
  uint64_t watched = 0;  // daemons of which a later call may find that they are gone
  std::vector<std::string> notes;  // files that could not be judged, and so stay
};

}  // namespace ckptfs
