// SPDX-License-Identifier: Apache-2.0
//
// RankModel is what one rank's model_optim_rng.pt of a legacy checkpoint holds beside its
// optimizer (megatron/training/checkpointing.py: generate_state_dict of core 0.16.1):
//
//   args                Namespace of the job
//   checkpoint_version  3.0
//   iteration
//   model               the state_dict of the rank's module; layers are counted from 0
//   model0, model1 ...  the same of each virtual stage
//   optimizer           state_dict of the optimizer (rank_optimizer.h)
//   opt_param_scheduler, rng_state, num_floating_point_operations_so_far
//
// Thread safety: immutable once read.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "formats/megatron/common_state.h"
#include "formats/megatron/legacy/rank_places.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::megatron {

inline constexpr std::string_view kRankFile = "model_optim_rng.pt";

// The module of a virtual stage.
struct RankChunk {
  std::vector<NamedTensor> tensors;  // in the order in which the module registers them
  std::vector<std::string> objects;  // _extra_state of its modules
};

struct RankModel {
  RankPlace place;
  std::string folder;  // "mp_rank_00"
  CommonState state;
  std::vector<RankChunk> chunks;  // of the stage, in their order

  const TorchFile& file() const { return state.file(); }
};

// kInvalid and kUnsupported name the rule, not the file.
Result<RankModel> ReadRankModel(CommonState state, const JobDegrees& job, const RankPlace& place);

// kInvalid if the rank's file is of another job, or of another save, than the first one's.
Status CheckSameSave(const RankModel& first, const RankModel& other);
// kInvalid if arguments say that another rank wrote one of the files.  A converter, which writes
// all of them, says one rank in all: that tells nothing.
Status CheckWriters(const JobDegrees& job, const std::vector<RankModel>& ranks);

}  // namespace ckptfs::megatron
