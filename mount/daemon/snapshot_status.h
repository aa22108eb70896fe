// SPDX-License-Identifier: Apache-2.0
//
// A daemon's status as JSON, its snapshots and the directories that it follows: the one place
// where status becomes text.
//
// Thread safety: pure functions.

#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "mount/daemon/follow_service.h"
#include "mount/daemon/hot_steps.h"
#include "mount/daemon/peer_service.h"
#include "mount/daemon/step_collector.h"
#include "snapshot/landing/spooler.h"
#include "snapshot/receive/receiver.h"

namespace ckptfs {

struct SnapshotStatus {
  ReceiverStatus receiver;
  CollectorStatus retention;
  std::optional<PeerServiceStatus> peers;
  std::optional<SpoolerStatus> spool;
  HotStepsStatus hot;
  std::vector<StepRecord> in_memory;  // steps that are not in the store yet
};

nlohmann::json ToJson(const ReceiverStatus& status);
nlohmann::json ToJson(const CollectorStatus& status);
nlohmann::json ToJson(const PeerPoolStatus& status);
nlohmann::json ToJson(const ProtectorStatus& status);
nlohmann::json ToJson(const PeerServiceStatus& status);
nlohmann::json ToJson(const SpoolerStatus& status);
nlohmann::json ToJson(const HotStepsStatus& status);
nlohmann::json ToJson(const FollowStatus& status);
// The receiver's, with "retention", "hot", "in_memory" and, where there are such, "spool" and
// "peers".
nlohmann::json ToJson(const SnapshotStatus& status);

}  // namespace ckptfs
