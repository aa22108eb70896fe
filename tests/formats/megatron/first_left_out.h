// SPDX-License-Identifier: Apache-2.0
//
// FirstLeftOut finds what a step of Megatron lacks.
//
// Thread safety: a pure function.

#pragma once

#include <algorithm>

#include "core/model/step_model.h"

namespace ckptfs::megatron {

// Null if nothing of this part was left out.
inline const LeftOut* FirstLeftOut(const StepModel& step, LeftOutPart part) {
  const auto found = std::ranges::find(step.left_out, part, &LeftOut::part);
  return found == step.left_out.end() ? nullptr : &*found;
}

}  // namespace ckptfs::megatron
