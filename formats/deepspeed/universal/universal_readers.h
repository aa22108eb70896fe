// SPDX-License-Identifier: Apache-2.0
//
// UniversalReaders are the engines that load a universal directory, as rows of what each does with
// an optimizer's states (DeepSpeed 0.19.7):
//
//   stages 1, 2 and BF16_Optimizer   checkpoint/universal_checkpoint.py load_hp_checkpoint_state
//   and
//                                    utils/tensor_fragment.py map_to_flat_opt_states: every file of
//                                    a parameter's directory, as one vector of fp32 per group
//   stage 3                          runtime/zero/stage3.py
//                                    load_hp_checkpoint_state_from_checkpoint_dir_stage3: fp32,
//                                    exp_avg and exp_avg_sq by name, and one step for all groups
//
// Thread safety: pure functions.

#pragma once

#include "core/view/reader_demands.h"

namespace ckptfs::deepspeed {

// The engine that the layout's stage means; without a stage, those of 1 and 2.
const ReaderDemands& UniversalReader(const Layout& layout);

// True if a stage-3 engine loses nothing of the step's states.
bool StageThreeLoads(const ShownState& shown);

}  // namespace ckptfs::deepspeed
