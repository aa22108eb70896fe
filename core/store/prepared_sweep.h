// SPDX-License-Identifier: Apache-2.0
//
// SweepPrepared tells what daemons that make steps together may still need of a store, and
// removes what daemons that are gone have left: parts of saves that are decided, or that are not
// whole and that no living daemon has a part of; and their records of themselves and of jobs.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/root.h"
#include "core/records/node_presence.h"

namespace ckptfs {

struct PreparedUse {
  std::set<std::string> directories;  // below blobs/
  std::set<Digest> manifests;
  uint64_t records = 0;            // removed, or to be removed
  uint64_t watched = 0;            // daemons that may be gone: their time is not over yet
  std::vector<std::string> notes;  // records that could not be judged
  bool unknown = false;            // some record may need anything
};

// REQUIRES: what is to be reclaimed was listed before; manifests are looked at after.
// `dry_run`: nothing is removed.
Result<PreparedUse> SweepPrepared(Storage& storage, const std::string& directory,
                                  PresenceWatch& watch, bool dry_run);

}  // namespace ckptfs
