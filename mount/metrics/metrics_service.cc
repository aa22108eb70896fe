// SPDX-License-Identifier: Apache-2.0

#include "mount/metrics/metrics_service.h"

#include <span>
#include <utility>

#include "core/base/strings.h"
#include "mount/logging.h"
#include "mount/metrics/metrics_text.h"

namespace ckptfs {

Result<std::unique_ptr<MetricsServer>> ServeMetrics(const std::string& address,
                                                    const std::string& store,
                                                    const std::string& mountpoint,
                                                    DaemonStatus status) {
  if (address.empty()) return nullptr;
  const auto text = [=, status = std::move(status)] {
    const MetricsSource source{store, mountpoint, true, status.Render(StatusDepth::kCounters)};
    return MetricsText({&source, 1});
  };
  CKPT_ASSIGN_OR_RETURN(const std::string where, ParseMetricsAddress(address));
  CKPT_ASSIGN_OR_RETURN(auto server, MetricsServer::Start(where, text));
  Log(LogLevel::kInfo, StrCat("metrics: http://", where.substr(0, where.rfind(':')), ":",
                              server->port(), "/metrics"));
  return server;
}

Status MoveMetrics(const std::string& address, const std::string& store,
                   const std::string& mountpoint, DaemonStatus status,
                   std::unique_ptr<MetricsServer>& server) {
  CKPT_ASSIGN_OR_RETURN(auto moved, ServeMetrics(address, store, mountpoint, std::move(status)));
  server = std::move(moved);
  return {};
}

}  // namespace ckptfs
