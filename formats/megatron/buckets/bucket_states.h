// SPDX-License-Identifier: Apache-2.0
//
// BucketStates are masters and moments of DistributedOptimizer as states of their parameters.  A
// directory (dp_reshardable) has them as flat buffers of ranks and does not say which parameter
// lies where.  So that is computed again, and taken only where all of this proves it:
//
//   - which ranks divide a buffer is Megatron's own numbering (parallel_state.py): of tensor and
//     pipeline ranks, or of experts' tensor, expert and pipeline ranks
//   - what such a rank holds of each tensor follows from the chunks it saved (rank_parts.h)
//   - begins and ends follow from sizes, chunks and alignment (bucket_layout.h)
//   - every master, cast, is the stored weight of its parameter: a sample of each, and all of them
//     where samples do not tell two parameters of a rank apart (value_prints.h)
//   - only one assignment fits (bucket_order.h)
//   - each part of a tensor is held by exactly the ranks of one pipeline stage; the embedding of
//     words may be on two stages, if the model has no output layer of its own, or predicts
//     further tokens (mtp)
//
// An optimizer that is not proved is left out, with the reason.
//
// Thread safety: pure but for reading.
// Lifetime: results refer to the state, the tensors and the slices.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/state_dict.h"
#include "formats/dcp/stored_state.h"
#include "formats/megatron/buckets/stored_buckets.h"
#include "formats/megatron/common_state.h"

namespace ckptfs::megatron {

// The stored tensor that one of the model is, and its layer of that; -1: all of it.
struct WeightSlice {
  size_t tensor = 0;
  int64_t layer = -1;
};

struct BucketStates {
  std::vector<StateDict::State> states;  // of optimizer 0 of the dict
  std::vector<CommonGroup> hyper_parameters;
  std::vector<std::shared_ptr<const TorchFile>> files;  // that hyper_parameters refer to
};

// `chain`: of BucketOptimizersOf.  `tensors`: the model's, with the slices that they are; those of
// experts have a dimension for them.  kInvalid and kUnsupported say why the optimizer must be left
// out; other errors are those of reading.  BLOCKS: on reading samples.
Result<BucketStates> DecodeBuckets(dcp::StoredState& state, const CommonState& common,
                                   const std::string& chain,
                                   const std::vector<StateDict::Tensor>& tensors,
                                   const std::vector<WeightSlice>& slices);

// True of tensors of experts, one after the other along their first dimension.
bool IsExperts(std::string_view name);

}  // namespace ckptfs::megatron
