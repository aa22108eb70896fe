// SPDX-License-Identifier: Apache-2.0
//
// JoinNames joins names that an optimizer has with names that a model's file has, where the live
// model had one more part in its names:
//
//   PEFT            base_model.model.q_proj.lora_A.default.weight    file: ...lora_A.weight
//                   (the adapter's name), and modules_to_save.default for a whole module
//   DDP, compile    module.q_proj.weight, _orig_mod.q_proj.weight    file: q_proj.weight
//
// A name that both have is joined with itself.  All others are joined by leaving one and the same
// part out of each, one to one, or none of them is; where two parts would do, none is.
//
// Thread safety: pure.

#pragma once

#include <map>
#include <span>
#include <string>

namespace ckptfs {

// By the optimizer's name, the model's.
std::map<std::string, std::string> JoinNames(std::span<const std::string> model,
                                             std::span<const std::string> optimizer);

}  // namespace ckptfs
