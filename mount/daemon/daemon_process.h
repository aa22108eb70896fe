// SPDX-License-Identifier: Apache-2.0
//
// The life of a daemon without a mount: it receives the snapshots of a store and makes
// them durable until a signal comes, then finishes what is whole.
//
// Thread safety: REQUIRES the process's first thread; starts the others.

#pragma once

#include <functional>
#include <string>

#include "core/base/result.h"
#include "mount/daemon/configuration.h"
#include "mount/daemon/snapshot_service.h"
#include "mount/logging.h"

namespace ckptfs {

struct DaemonRequest {
  SnapshotRequest snapshots;
  // As MountRequest's:
  std::string log;
  std::string again;
  LogFormat log_format = LogFormat::kText;
  std::string metrics_listen;
  ConfigurationRequest configuration;
};

// `ready` is called once when it receives, or waits for another daemon to go; then returns
// when it ended.
Status RunDaemon(const DaemonRequest& request, const std::function<void()>& ready);

}  // namespace ckptfs
