// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/implied_values.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

#include "formats/deepspeed/document_keys.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {
namespace {

// The defaults that every Adam has.
constexpr std::array<std::string_view, 4> kOfAdam = {"lr", "betas", "eps", "weight_decay"};

// True if weight decay is apart from the moments; nothing if the group does not say it.
// Both types are AdamW unless adam_w_mode is off (deepspeed/ops/adam, 0.19.7).
Result<std::optional<bool>> IsDecoupled(const StepModel& step, PickleRef group) {
  if (group["weight_decay"].Number() == 0) return std::optional(true);
  const Document* config = step.FindDocument(deepspeed::kDsConfig);
  if (config == nullptr) return std::optional<bool>();
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*config));
  const PickleRef optimizer = RootOf(tree)["optimizer"];
  const auto type = optimizer["type"].String();
  if (!type) return std::optional<bool>();
  std::string name(*type);
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name == "adamw") return std::optional(true);
  if (name != "adam") return std::optional<bool>();
  return std::optional(optimizer["params"]["adam_w_mode"].Bool().value_or(true));
}

}  // namespace

Result<std::vector<ImpliedValue>> ImpliedValues(const StepModel& step, PickleRef group,
                                                bool amsgrad) {
  std::vector<ImpliedValue> implied;
  const bool adam = std::all_of(kOfAdam.begin(), kOfAdam.end(),
                                [&](std::string_view key) { return bool(group[key]); });
  const bool corrected = group["bias_correction"].Bool().value_or(true);
  if (!adam || !corrected || !step.framework.starts_with("deepspeed")) return implied;
  const auto add = [&](std::string_view key, std::optional<bool> value) {
    if (!group[key]) implied.emplace_back(key, value);
  };
  add("amsgrad", amsgrad);
  add("maximize", false);
  add("capturable", false);
  add("differentiable", false);
  add("foreach", std::nullopt);
  add("fused", std::nullopt);
  CKPT_ASSIGN_OR_RETURN(const std::optional<bool> decoupled, IsDecoupled(step, group));
  if (decoupled) add("decoupled_weight_decay", decoupled);
  return implied;
}

}  // namespace ckptfs::dcp
