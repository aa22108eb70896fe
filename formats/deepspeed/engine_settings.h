// SPDX-License-Identifier: Apache-2.0
//
// EngineSettings is what a step's ds_config says of how its engine lays out memory (DeepSpeed
// 0.19.7, runtime/config.py, runtime/zero/config.py), and nothing in its files says otherwise.
//
// Thread safety: values; a pure function.

#pragma once

#include <cstdint>
#include <optional>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs::deepspeed {

struct EngineSettings {
  bool bf16 = false;                       // bf16 is enabled
  bool deals = false;                      // round_robin_gradients: partitions have another order
  bool aligns = false;                     // parameter_alignment
  bool wide_gradients = false;             // they are added up in fp32
  bool offloads = false;                   // the optimizer is on the CPU
  std::optional<uint64_t> sub_group_size;  // elements; nothing where it is not a number
};

// Nothing if the step has no ds_config, or has the name of a file in its place, which older engines
// kept where a script gave them one.
Result<std::optional<EngineSettings>> EngineSettingsOf(const StepModel& step);

}  // namespace ckptfs::deepspeed
