// SPDX-License-Identifier: Apache-2.0

#include "formats/optimizer/hyper_parameters.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

// The defaults that every Adam has.
constexpr std::array<std::string_view, 4> kOfAdam = {"lr", "betas", "eps", "weight_decay"};

constexpr std::string_view kMemberNames = "param_names";

constexpr std::string_view kArguments = "client/args";  // of Megatron's job

// A key and its value: True, False or None (nothing).
using ImpliedValue = std::pair<std::string_view, std::optional<bool>>;

// Megatron hands its arguments' word to the Adam, or the Adam has its default, which is AdamW
// (optimizer/__init__.py, optimizer_config.py of core 0.16.1).
Result<std::optional<bool>> IsDecoupledByArguments(const Document& arguments) {
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(arguments));
  const PickleRef root = RootOf(tree);
  const PickleRef fields = root.IsDict() ? root : root.State();
  if (!fields || !fields.IsDict()) return std::optional<bool>();
  const PickleRef said = fields["decoupled_weight_decay"];
  return said ? said.Bool() : std::optional(true);
}

// True if weight decay is apart from the moments; nothing if the group does not say it.
// Both types are AdamW unless adam_w_mode is off (deepspeed/ops/adam, 0.19.7).
Result<std::optional<bool>> IsDecoupled(const StepModel& step, PickleRef group) {
  if (group["weight_decay"].Number() == 0) return std::optional(true);
  const Document* arguments = step.FindDocument(kArguments);
  if (arguments != nullptr && !TraitsOf(step).engine) return IsDecoupledByArguments(*arguments);
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

// The values that the dict of a fused Adam's group implies and lacks.
Result<std::vector<ImpliedValue>> ImpliedValues(const StepModel& step, PickleRef group,
                                                const StatesByKind& kinds) {
  std::vector<ImpliedValue> implied;
  const bool adam = kinds.contains("exp_avg_sq") &&
                    std::all_of(kOfAdam.begin(), kOfAdam.end(),
                                [&](std::string_view key) { return bool(group[key]); });
  const bool corrected = group["bias_correction"].Bool().value_or(true);
  if (!adam || !corrected || !TraitsOf(step).fused_adam) return implied;
  const auto add = [&](std::string_view key, std::optional<bool> value) {
    if (!group[key]) implied.emplace_back(key, value);
  };
  add("amsgrad", kinds.contains("max_exp_avg_sq"));
  add("maximize", false);
  add("capturable", false);
  add("differentiable", false);
  add("foreach", std::nullopt);
  add("fused", std::nullopt);
  CKPT_ASSIGN_OR_RETURN(const std::optional<bool> decoupled, IsDecoupled(step, group));
  if (decoupled) add("decoupled_weight_decay", decoupled);
  return implied;
}

}  // namespace

Result<PickleTree> RecordedHyperParameters(const Group& group) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items;
  if (!group.hyper_parameters.empty()) {
    CKPT_ASSIGN_OR_RETURN(const ParsedPickle parsed, ParsePickle(group.hyper_parameters));
    for (const auto& [key, value] : RootOf(parsed.tree).Items()) {
      if (key.String() == kMemberNames) continue;
      const NodeId name = builder.Copy(key);
      items.emplace_back(name, builder.Copy(value));
    }
  }
  const NodeId root = builder.Dict(items);
  return std::move(builder).Finish(root);
}

Result<std::optional<PickleTree>> RecordedMemberNames(const Group& group) {
  if (group.hyper_parameters.empty()) return std::nullopt;
  CKPT_ASSIGN_OR_RETURN(const ParsedPickle parsed, ParsePickle(group.hyper_parameters));
  const PickleRef names = RootOf(parsed.tree)[kMemberNames];
  if (!names) return std::nullopt;
  PickleBuilder builder;
  const NodeId root = builder.Copy(names);
  return std::move(builder).Finish(root);
}

Result<PickleTree> TorchHyperParameters(const ShownState& shown, const ShownGroup& group,
                                        bool trusted) {
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, RecordedHyperParameters(*group.recorded));
  const PickleRef dict = RootOf(tree);
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [key, value] : dict.Items()) {
    const auto name = key.String();
    if (!name || *name == "params" || !(trusted || RunsNoCode(value))) continue;
    const NodeId shown_key = builder.String(*name);
    items.emplace_back(shown_key, builder.Copy(value));
  }
  CKPT_ASSIGN_OR_RETURN(const auto implied, ImpliedValues(shown.step(), dict, group.kinds));
  for (const auto& [key, value] : implied) {
    const NodeId shown_key = builder.String(key);
    items.emplace_back(shown_key, value ? builder.Bool(*value) : builder.None());
  }
  const NodeId root = builder.Dict(items);
  return std::move(builder).Finish(root);
}

Result<std::string> StepBytes(double number) {
  const auto count = static_cast<float>(number);
  if (static_cast<double>(count) != number) {
    return Fail(ErrorCode::kUnsupported, StrCat(std::to_string(number),
                                                " steps: torch's optimizers count in fp32, which "
                                                "cannot hold that number"));
  }
  return std::string(std::bit_cast<std::array<char, sizeof(float)>>(count).data(), sizeof(float));
}

}  // namespace ckptfs
