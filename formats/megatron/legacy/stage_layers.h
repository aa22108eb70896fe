// SPDX-License-Identifier: Apache-2.0
//
// StageLayers gives the layers of each stage their numbers in the model.  A rank's module counts
// them from 0.  A pipeline passes data through its first virtual stages, stage by stage, then
// through the second ones, so layers follow each other in that order
// (transformer_layer.py: get_transformer_layer_offset of core 0.16.1).
//
// How many layers a stage has is in its files.  The arguments must say the same: all stages have
// as many, unless they name an uneven split; those that say numbers of it are compared with it.
//
// Thread safety: values; pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "core/base/result.h"
#include "formats/megatron/legacy/rank_model.h"

namespace ckptfs::megatron {

class StageLayers {
 public:
  // kInvalid names the folder whose layers contradict the others' or the arguments.
  // REQUIRES: ranks of all stages.
  static Result<StageLayers> Make(const JobDegrees& job, const std::vector<RankModel>& ranks);

  // The model's number of the first layer of a virtual stage.
  uint64_t First(uint32_t stage, uint32_t chunk) const { return first_[chunk * stages_ + stage]; }

 private:
  uint32_t stages_ = 1;
  std::vector<uint64_t> first_;  // outer = virtual stage, inner = stage
};

}  // namespace ckptfs::megatron
