// SPDX-License-Identifier: Apache-2.0
//
// A DeepSpeed universal directory as a Source: what ds_to_universal of 0.14 -
// 0.19.7 writes for stages up to 2 ({'param': tensor, ...}) and for stage 3
// (bare flat tensors), and what our own universal view shows.
//
//   <tag>/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,...,step}.pt
//   <tag>/zero/optimizer_state.pt, <tag>/*model_states.pt, <save>/latest_universal
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeDeepSpeedUniversalSource();

}  // namespace ckptfs
