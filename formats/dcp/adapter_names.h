// SPDX-License-Identifier: Apache-2.0
//
// PEFT's modules hold several adapters by name, and its files none: a Trainer under FSDP saves
// "...q_proj.lora_A.weight" and, of its optimizer, "...q_proj.lora_A.default.weight".  The two
// are one parameter where exactly one adapter's name, the same throughout, tells them apart.
// (peft/utils/save_and_load.py get_peft_model_state_dict)
//
// Thread safety: pure.

#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace ckptfs::dcp {

struct AdapterName {
  std::string weight;   // "q_proj.lora_A.weight"
  std::string adapter;  // "default"
};

// Returns a live parameter's name as a file of the adapter spells it, if the file has it.
std::optional<AdapterName> WithoutAdapter(std::string_view live,
                                          const std::function<bool(std::string_view)>& has);

}  // namespace ckptfs::dcp
