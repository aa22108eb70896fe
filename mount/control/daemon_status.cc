// SPDX-License-Identifier: Apache-2.0

#include "mount/control/daemon_status.h"

#include <nlohmann/json.hpp>

#include "mount/control/process_status.h"

namespace ckptfs {

nlohmann::json DaemonStatus::Render(StatusDepth depth) const {
  nlohmann::json status =
      filesystem == nullptr ? nlohmann::json::object()
                            : nlohmann::json::parse(filesystem->StatusJson(depth), nullptr, false);
  status["process"] = ProcessJson();
  const nlohmann::json received = snapshots ? snapshots() : nlohmann::json();
  if (!received.is_null()) status["snapshots"] = received;
  if (following) status["following"] = following();
  if (mirror) status["ingest"] = mirror();
  if (configuration) status["configuration"] = configuration();
  return status;
}

}  // namespace ckptfs
