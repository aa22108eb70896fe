// SPDX-License-Identifier: Apache-2.0
//
// RankOptimizer says whose the states of one rank's optimizer are.  A legacy checkpoint has them in
// one of two forms:
//
//   numbered  in model_optim_rng.pt (Float16OptimizerWithFloat16Params, FP32Optimizer):
//             {optimizer: {state: {N: {exp_avg, exp_avg_sq}}, param_groups: [{params: [N, ...]}]},
//              fp32_from_fp16_params: [[a master for each 16-bit member] for each group]}
//   flat      in distrib_optim.pt (DistributedOptimizer), gathered from data-parallel ranks:
//             {buckets_coalesced: True, <buffer>: {(dtype of parameters, dtype of gradients):
//              {param, exp_avg, exp_avg_sq: [numel_unpadded]}}}
//
// or lists of these, one for each optimizer of a chain: dense parameters, experts.
//
// Neither names a parameter.  Both follow from the order in which the rank's module registers its
// parameters, which the file has: the order of its state_dict.  Numbers run over groups, and in a
// group over its members in that order.  A buffer holds the parameters of one virtual stage and
// type in the opposite order, each at the next multiple of 64 elements of its bucket.  That is
// Megatron's rule (optimizer/__init__.py, distributed/param_and_grad_buffer.py of core 0.16.1),
// and it is believed where it is proved:
//
//   - groups have as many members as the rule gives them, states their parameters' shapes, buffers
//     end where the last parameter ends
//   - every master, cast, may be the weight that the rule says (cast_match.h)
//   - where parameters are in fp32 and numbered there are no masters: their shapes must contradict
//     every other order (core/state/ownership.h)
//
// Thread safety: pure but for reading.
// Units: elements.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "formats/megatron/legacy/held_tensors.h"
#include "formats/megatron/legacy/rank_model.h"

namespace ckptfs::megatron {

inline constexpr std::string_view kFlatFile = "distrib_optim.pt";

// The states of a rank's tensors, by chunk and entry.
struct RankStates {
  using Key = std::pair<uint32_t, size_t>;
  std::map<Key, std::map<std::string, PartBytes>> states;
  std::map<Key, int64_t> steps;      // where each parameter is counted
  std::vector<CommonGroup> groups;   // that have members on the rank
  bool scaler = false;               // it has a grad_scaler
  std::vector<std::string> unknown;  // kinds of states that are neither tensors of their
                                     // parameters' shapes nor counts
};

// A file of flat buffers.
struct FlatFile {
  TorchFile file;
  BlobIndex blob;
};

// `flat`: of the same rank, where there is one.  kInvalid and kUnsupported say why the optimizer
// must be left out; other errors are those of reading.  BLOCKS: on reading samples.
Result<RankStates> ReadRankStates(const RankModel& rank, const JobDegrees& job,
                                  const FlatFile* flat);

}  // namespace ckptfs::megatron
