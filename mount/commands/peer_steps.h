// SPDX-License-Identifier: Apache-2.0
//
// Steps in the memory of daemons, for a command: it asks daemons itself, and needs neither a
// mount nor a daemon of its own.
//
// Thread safety: used by the process's first thread only.

#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/peer/peer_keys.h"
#include "core/peer/peer_records.h"
#include "core/store/step_catalogue.h"
#include "core/store/store.h"

namespace ckptfs {

inline constexpr std::chrono::seconds kPeerPatience{3};  // of a command

// Daemons that listen, and who asks them.  None without a record of one.
struct KnownPeers {
  PeerIdentity self;
  std::vector<PeerRecord> peers;
};
// Prints records that make no sense to stderr.  BLOCKS: on the store.
Result<KnownPeers> FindPeers(Store& store);

// A step that is read from daemons' memory.
struct PeerStep {
  std::unique_ptr<StepCatalogue> catalogue;  // which `step` needs
  std::shared_ptr<const Step> step;
};
// The newest step of the run that daemons hold together, which must be `id` unless that is empty.
// kNotFound if there is none, or it is another one.
// BLOCKS: on the network, and on the store.  The store must outlive what it returns.
Result<PeerStep> LoadPeerStep(Store& store, const std::string& run, const std::string& id);

}  // namespace ckptfs
