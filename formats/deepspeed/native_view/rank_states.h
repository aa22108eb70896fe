// SPDX-License-Identifier: Apache-2.0
//
// The files that one rank's engine reads (DeepSpeed 0.19.7, runtime/engine.py _load_checkpoint,
// _load_zero_checkpoint), with what DeepSpeed's own tools ask of them besides
// (utils/zero_to_fp32.py, checkpoint/ds_to_universal.py):
//
//   model states      module, buffer_names, param_shapes, shared_params; frozen parameters; the
//                     engine's counters, schedule and client state.  At ZeRO 3 parameters are
//                     empty tensors in module, and frozen ones are slices
//   optimizer states  masters, the optimizer's states and its groups, flat; the loss scaler.
//                     BF16_Optimizer ignores what only ZeRO 1 and 2 have
//
// Parameters are not aligned.  An engine that aligns them (parameter_alignment) does so where a
// file says nothing of it; to others it says how many parameters each group has, which they
// compare.
//
// Thread safety: pure functions.
// Lifetime: results refer to the step's atoms and blobs by index.

#pragma once

#include <span>

#include "core/base/result.h"
#include "formats/deepspeed/native_view/partitions.h"
#include "formats/deepspeed/native_view/target_engine.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::deepspeed {

// `groups`: of the rank's tensor-parallel rank (FlatGroupsOf).  At stages 1 and 2 of dp rank 0
// only.
Result<ArchiveContent> ModelStatesOf(const ShownState& shown, const TargetEngine& engine,
                                     std::span<const FlatGroup> groups, const RankCoordinate& rank);
Result<ArchiveContent> OptimizerStatesOf(const ShownState& shown, const TargetEngine& engine,
                                         std::span<const FlatGroup> groups,
                                         const RankCoordinate& rank);

}  // namespace ckptfs::deepspeed
