// SPDX-License-Identifier: Apache-2.0
//
// What daemons that make steps together may still need of a store, and what those that are
// gone have left: their parts of saves that are decided, or that no living daemon has a
// part of and are not whole; what they said of themselves and of jobs.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/records/node_presence.h"
#include "core/io/root.h"

namespace ckptfs {

struct PreparedUse {
  std::set<std::string> directories;  // below blobs/
  std::set<Digest> manifests;
  uint64_t records = 0;            // that went, or would
  uint64_t watched = 0;            // daemons that may be gone: their time is not over yet
  std::vector<std::string> notes;  // what could not be judged
  bool unknown = false;            // that may need anything
};

// REQUIRES: what is to be reclaimed was listed before; manifests are looked at after.
// `dry_run`: nothing is removed.
Result<PreparedUse> SweepPrepared(Storage& storage, const std::string& directory,
                                  PresenceWatch& watch, bool dry_run);

}  // namespace ckptfs
