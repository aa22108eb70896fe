// SPDX-License-Identifier: Apache-2.0
//
// MemoryAttempts puts together what daemons hold in memory: an attempt at a step is whole when
// some daemon holds each rank's file, or enough of them units of one stripe of it, and protected
// when each file's owner has said so.  Nothing is believed that two daemons say differently.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/peer/peer_protocol.h"
#include "core/records/commit_records.h"

namespace ckptfs {

// Each daemon's shelf, by node.
using PeerShelves = std::map<Digest, std::vector<ShelvedPart>>;

// The nodes that hold a rank's file, or units of it.
struct HeldRank {
  uint64_t bytes = 0;
  Digest chunks;
  ShelvedState state = ShelvedState::kHeld;
  std::vector<Digest> nodes;                      // of the whole file
  StripeShape shape;                              // of its units, if there are any
  Digest parity_chunks;                           // likewise
  std::map<uint32_t, std::vector<Digest>> units;  // by number

  // True if all of the file can be had.
  bool there() const;
};

struct MemoryAttempt {
  AttemptName name;
  uint64_t step = 0;
  uint32_t world = 0;
  int64_t mtime_ns = 0;  // rank 0's, once that is held
  std::map<uint32_t, HeldRank> ranks;
  std::string wrong;  // why it can never be shown; empty: nothing is wrong

  std::string Directory() const;
  bool whole() const;
  bool is_protected() const;
  // "ranks 2-3 are held by no node that answers", or what else hinders it; empty if it is whole
  // and protected.
  std::string Hindrance() const;
};

// All attempts of which something is held, by run, then by attempt's directory.
std::vector<MemoryAttempt> AttemptsOn(const PeerShelves& shelves);
// The newest of a run that can be shown; null if there is none.  Saves are ordered by their time,
// those of one life of a job by their number.
const MemoryAttempt* NewestProtected(const std::vector<MemoryAttempt>& attempts,
                                     std::string_view run);
bool IsEarlier(const MemoryAttempt& a, const MemoryAttempt& b);

}  // namespace ckptfs
