// SPDX-License-Identifier: Apache-2.0
//
// The `.pt` files of a universal directory, as DeepSpeed 0.19.7 reads them
// (runtime/engine.py, runtime/base_optimizer.py, runtime/zero/stage3.py):
//
//   mp_rank_XX_model_states.pt       counters, degrees, lr_scheduler, client state,
//                                    buffers; no weights (the loader takes them
//                                    from zero/)
//   zero/optimizer_state.pt          loss scaler, ds_version, param_groups (stages
//                                    1, 2, BF16), optimizer_state_dict (stage 3)
//   zero/<name>/<state>.pt           {'param': full tensor, how to cut it}
//   zero/<name>/step.pt              the bare step
//
// Thread safety: pure functions.
// Lifetime: results refer to the step's atoms and blobs by index.

#pragma once

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/deepspeed/universal/universal_index.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::deepspeed {

// The source's model-parallel rank that takes the place of rank `rank` of
// index.model_files (as the loader itself maps ranks where the numbers differ);
// 0 where the source's ranks all said the same; the rank itself of a step that has
// nothing but weights, of which every rank's file holds its own.
uint32_t SourceRank(const StepModel& step, const UniversalIndex& index, uint32_t rank);

// The source rank of that model-parallel rank: files of ranks with one source rank are equal.
Result<ArchiveContent> ModelStatesFile(const ShownState& shown, uint32_t source_rank);
// Says nothing of the loss scale where ScalesAnew (engine_dict.h), so that the engine keeps what
// its configuration says (stage_1_and_2.py, stage3.py: sd.get).
Result<ArchiveContent> OptimizerState(const ShownState& shown, const UniversalIndex& index);
// The hyper-parameters that OptimizerState does not give an engine of the layout because groups
// differ in them, a line for the user; empty if it gives all.
Result<std::string> HyperParametersLeftOut(const ShownState& shown);
Result<ArchiveContent> ParameterState(const ShownState& view, const UniversalParameter& parameter,
                                      const UniversalState& state);

}  // namespace ckptfs::deepspeed
