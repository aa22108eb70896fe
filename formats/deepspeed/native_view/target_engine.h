// SPDX-License-Identifier: Apache-2.0
//
// TargetEngine is an engine that loads native files: what its layout asks for, and what nothing but
// the source's configuration tells.  An engine flattens the parameters of each group of its
// optimizer in their order and loads the pieces by position, so the source must tell that order
// (DeepSpeed 0.19.7, runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py):
//
//   as the optimizer has them          BF16_Optimizer, ZeRO 3, ZeRO 1 and 2
//   dealt out: p0 p3 p6 | p1 p4 ...    ZeRO 1 and 2 with round_robin_gradients: every dp-th one
//                                      from the first, then from the second ...
//
// A source that dealt them out is undone for its own dp, and they are dealt for the target's.
//
// Thread safety: immutable values; pure functions.
// Lifetime: holds indexes into the step.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"

namespace ckptfs::deepspeed {

struct TargetEngine {
  uint32_t stage = 1;  // of ZeRO
  uint32_t dp = 1;
  uint32_t tp = 1;
  bool bf16 = false;            // its configuration enables bf16: names of files begin with bf16_
  bool aligns = false;          // parameter_alignment, as in the source's configuration
  uint64_t sub_group_size = 0;  // ZeRO 3: elements of a rank
  // By the number of the optimizer's group: its parameters in the order in which the engine
  // flattens them.
  std::vector<std::vector<ParameterIndex>> groups = {};
  std::vector<std::string> others = {};  // lines on engines of the layout that this is not for
};

// kUnsupported says what is not known of the order, or what no engine would take; kInvalid names a
// parameter that cannot be cut so.
Result<TargetEngine> TargetEngineOf(const ShownState& shown);

// The order of `members` dealt out to `ranks`, and what it was before that.
std::vector<ParameterIndex> Dealt(const std::vector<ParameterIndex>& members, uint32_t ranks);
std::vector<ParameterIndex> Undealt(const std::vector<ParameterIndex>& members, uint32_t ranks);

}  // namespace ckptfs::deepspeed
