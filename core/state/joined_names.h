// SPDX-License-Identifier: Apache-2.0
//
// JoinNames and JoinName join names that an optimizer has with names that a model's file has, where
// the live model had one more part in its names:
//
//   PEFT            base_model.model.q_proj.lora_A.default.weight    file: ...lora_A.weight
//                   (the adapter's name, behind an attribute in which PEFT keeps adapters by
//                   name), and modules_to_save.default for a whole module
//                   (peft/utils/save_and_load.py get_peft_model_state_dict)
//   DDP, compile    module.q_proj.weight, _orig_mod.q_proj.weight    file: q_proj.weight
//
// No other part may go: "critic.0.weight" is not the "0.weight" of a model.
//
// JoinNames joins a name that both have with itself.  All others are joined by leaving one and the
// same part out of each, one to one, or none of them is; where two parts would do, none is.
//
// Thread safety: pure.

#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ckptfs {

inline constexpr size_t kMaxNameParts = 64;  // a name of more is joined with nothing

struct JoinedName {
  std::string name;  // the model's: "q_proj.lora_A.weight"
  std::string part;  // that the live name has more: "default"
};

// The model's name of one live name, where leaving one part out gives exactly one.
std::optional<JoinedName> JoinName(std::string_view live,
                                   const std::function<bool(std::string_view)>& has);

// By the optimizer's name, the model's.
std::map<std::string, std::string> JoinNames(std::span<const std::string> model,
                                             std::span<const std::string> optimizer);

}  // namespace ckptfs
