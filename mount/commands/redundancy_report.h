// SPDX-License-Identifier: Apache-2.0
//
// Renders what `ckptfs redundancy` says of a step, or of steps of a run: as JSON, as text, as a
// picture.
//
// Thread safety: pure functions.
// Units: bytes; pixels in the picture.

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/redundancy/redundancy.h"
#include "core/redundancy/unchanged.h"
#include "mount/commands/picture.h"

namespace ckptfs {

nlohmann::json RedundancyJson(const StepModel& step, const RedundancyReport& report);
// `tensors`: a line for each tensor, too.
void PrintRedundancy(const StepModel& step, const RedundancyReport& report, bool tensors);
Picture DrawRedundancy(const StepModel& step, const RedundancyReport& report,
                       const std::string& title);

// A step of a chain, as the user names it.
struct ChainStep {
  std::string name;
  const StepModel* model = nullptr;
};
// REQUIRES: since[i] is of steps[i + 1] against steps[i].
nlohmann::json UnchangedJson(const std::vector<ChainStep>& steps,
                             const std::vector<StepSince>& since);
void PrintUnchanged(const std::vector<ChainStep>& steps, const std::vector<StepSince>& since,
                    bool tensors);
Picture DrawUnchanged(const std::vector<ChainStep>& steps, const std::vector<StepSince>& since);

}  // namespace ckptfs
