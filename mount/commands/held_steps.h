// SPDX-License-Identifier: Apache-2.0
//
// The daemons of this machine know of steps more than the store does: steps that are not
// published yet, and sources that are others by now.
//
// Thread safety: free functions without state.

#pragma once

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/store/store.h"
#include "mount/control/control_client.h"

namespace ckptfs {

struct HeldStep {
  LiveMount daemon;
  nlohmann::json record;  // as RecordJson's
  std::string run() const { return record.value("run", ""); }
  std::string id() const { return record.value("id", ""); }
  StepRecord AsRecord() const;  // as far as it orders steps (core/store/lives.h)
};

struct HeldSteps {
  std::vector<HeldStep> steps;               // whole, in memory
  std::vector<std::string> waiting;          // "job/7: waiting for ranks 2-3"
  std::map<std::string, std::string> stale;  // by "RUN/ID", why its reads fail
};

// The steps that this user's daemons on the store (absolute) hold.  A daemon that does not
// answer in time is left out.  A caller that looks at the store afterwards misses no step
// that is published meanwhile.
HeldSteps FindHeldSteps(const std::string& store, Patience patience = std::chrono::seconds(5));

}  // namespace ckptfs
