// SPDX-License-Identifier: Apache-2.0
//
// RankStates is what one rank's file holds, taken out so that its pickle's tree can be dropped:
// values by name for a model, by the optimizer's number and the state's name for an optimizer.
//
// Thread safety: values; pure but for reading the file.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "formats/deepspeed/torch_optimizer.h"
#include "formats/rank_shards/shard_value.h"

namespace ckptfs::rank_shards {

struct RankModel {
  std::vector<std::pair<std::string, ShardValue>> tensors;  // in the module's order
  std::vector<std::string> others;                          // entries that are not tensors
};

// kInvalid names the tensor and the rule.
Result<RankModel> ReadRankModel(const TorchFile& file, BlobIndex blob, uint64_t rank);

struct RankOptimizer {
  deepspeed::TorchOptimizer torch;  // without values; plain tensors, numbers, names of others
  std::map<std::pair<int64_t, std::string>, ShardValue> shards;      // tensors, plain ones too
  std::map<std::pair<int64_t, std::string>, std::string> strangers;  // why others are not read
};

Result<RankOptimizer> ReadRankOptimizer(const TorchFile& file, BlobIndex blob, uint64_t rank);

}  // namespace ckptfs::rank_shards
