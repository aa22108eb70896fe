// SPDX-License-Identifier: Apache-2.0
//
// The native DeepSpeed checkpoint as a Source: what engine.save_checkpoint of
// 0.14 - 0.19.7 writes at any ZeRO stage, with BF16_Optimizer, tensor and
// pipeline parallelism and native MoE.
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeDeepSpeedSource();

}  // namespace ckptfs
