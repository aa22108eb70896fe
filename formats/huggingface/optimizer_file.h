// SPDX-License-Identifier: Apache-2.0
//
// Finds where a torch optimizer's state_dict lies beside whole weights: Trainer's
// optimizer.pt, accelerate's optimizer.bin, Lightning's own file.  ReadTorchOptimizer
// (formats/deepspeed/torch_optimizer.h) reads it, and decides whose its states are.
//
// Thread safety: pure functions.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ckptfs::huggingface {

// The name of the optimizer's file among those of a directory; empty if there is none,
// or there are several optimizers or models, of which nothing tells what it trains.
std::string OptimizerFileAmong(const std::vector<std::string>& names);
bool IsOptimizerFile(std::string_view name);

// The weights of another model of accelerate's than the first: "model_1.safetensors".
bool IsOtherModel(std::string_view name);

}  // namespace ckptfs::huggingface
