// SPDX-License-Identifier: Apache-2.0
//
// The metrics of one daemon, over HTTP.
//
// Thread safety: as MetricsServer's.

#pragma once

#include <memory>
#include <string>

#include "core/base/result.h"
#include "mount/control/daemon_status.h"
#include "mount/metrics/metrics_server.h"

namespace ckptfs {

// Null where `address` is empty.  `status` is asked for counters only: a scrape waits for no
// source.  Lifetime: what it uses must outlive the server.
Result<std::unique_ptr<MetricsServer>> ServeMetrics(const std::string& address,
                                                    const std::string& store,
                                                    const std::string& mountpoint,
                                                    DaemonStatus status);

// Has it listen at another address, or nowhere; where that cannot be, it stays as it is.
Status MoveMetrics(const std::string& address, const std::string& store,
                   const std::string& mountpoint, DaemonStatus status,
                   std::unique_ptr<MetricsServer>& server);

}  // namespace ckptfs
