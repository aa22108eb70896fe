// SPDX-License-Identifier: Apache-2.0
//
// These functions read the names of training tools' directories and files:
//
//   checkpoint-500                  transformers' Trainer
//   checkpoint_3, step_500, epoch_2 accelerate: its own naming, and its examples'
//   step-500                        torchtitan
//   epoch=1-step=500.ckpt           Lightning; also -v1.ckpt, last.ckpt
//   global_step500                  DeepSpeed
//   iter_0000500                    Megatron
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ckptfs {

// The number of a step that is named in one of these forms; nothing for other names
// and for numbers beyond 64 bits.
std::optional<uint64_t> StepNumber(std::string_view name);

// "checkpoint-500", which only transformers' Trainer and its imitators write.
bool IsTrainerName(std::string_view name);

// "....ckpt" with a name before it: Lightning's, a file or a directory.
bool IsLightningName(std::string_view name);

}  // namespace ckptfs
