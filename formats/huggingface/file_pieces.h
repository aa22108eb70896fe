// SPDX-License-Identifier: Apache-2.0
//
// A file that is given by itself may be one of several of a model:
//
//   a shard          an index beside it, or its own name ("-00001-of-00002"), says so
//   a known part     DeepSpeed's *model_states.pt, Megatron's mp_rank_NN/model_optim_rng.pt and
//   Meta's
//                    consolidated.NN.pth, with others that differ in a number
//   a rank's         others differ in the number of a rank ("rank0.safetensors"): each may have a
//                    part of the model, or all of it
//
// Thread safety: pure but for the directories and indexes that are read.

#pragma once

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/source.h"

namespace ckptfs::huggingface {

// kUnsupported if the candidate is a shard or a known part.  An index that cannot be read says
// nothing.  BLOCKS: on reading indexes beside it.
Status CheckNoPiece(const StepCandidate& candidate);

// Names the other ranks' files.  Errors of the file alone.  BLOCKS: on listing its directory.
Status LeaveOutRanks(const StepCandidate& candidate, StepModel& header);

}  // namespace ckptfs::huggingface
