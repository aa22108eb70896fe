// SPDX-License-Identifier: Apache-2.0
//
// OptimizerChain is the optimizers that one rank's file has: one, or one of dense parameters and
// one of experts, and the parameters that each has by Megatron's rule (job/job_state.h).
//
// Thread safety: values; pure functions.
// Lifetime: refers to the rank.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "formats/megatron/common_state.h"
#include "formats/megatron/legacy/rank_model.h"

namespace ckptfs::megatron {

// A parameter of the rank, in the order of registration.
struct RankParameter {
  uint32_t chunk = 0;
  size_t entry = 0;
  const NamedTensor* tensor = nullptr;
};

struct ChainedOptimizer {
  PickleRef root;  // as optimizer.state_dict() gives it
  std::vector<CommonGroup> groups;
  std::vector<RankParameter> parameters;     // that it trains
  std::vector<std::vector<size_t>> members;  // by group: of `parameters`, in their order
};

// In the file's order; none where the rank has no optimizer.  kInvalid says which rule leaves
// several ways.
Result<std::vector<ChainedOptimizer>> OptimizersOf(const RankModel& rank, const JobDegrees& job);

}  // namespace ckptfs::megatron
