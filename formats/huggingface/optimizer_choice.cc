// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/optimizer_choice.h"

#include <array>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/strings.h"
#include "core/state/model_choice.h"
#include "core/state/trained_module.h"
#include "formats/huggingface/torch_state.h"

namespace ckptfs::huggingface {
namespace {

// Tools that save an average as the model, and what is trained beside it: Lightning's
// WeightAveraging; mmengine's EMAHook, in whose files "message_hub" stands, too.
struct AveragedModel {
  std::string_view average;
  std::string_view trained;
  std::string_view mark;
};
constexpr auto kAveragedModels =
    std::to_array<AveragedModel>({{"state_dict", "current_model_state", "current_model_state"},
                                  {"state_dict", "ema_state_dict", "message_hub"}});

struct Reason {
  std::string why;
  std::string remedy;
};

// Why an optimizer in the file of the weights does not train them.
std::optional<Reason> WhyNotOurs(PickleRef root, const WeightsFile& weights,
                                 std::string_view optimizer) {
  std::set<std::string_view> averages;
  bool trained = false;
  for (const AveragedModel& row : kAveragedModels) {
    if (!root.IsDict() || !root[row.trained] || !root[row.mark]) continue;
    averages.insert(row.average);
    trained = trained || weights.model == row.trained;
    if (weights.model != row.average) continue;
    return Reason{
        StrCat("the file's ", row.average,
               " is an average of the weights that the optimizer trains ('", row.trained, "')"),
        StrCat("--model ", row.trained, " takes those weights")};
  }
  if (IsAverageKey(weights.model) && !trained) {
    return Reason{StrCat("'", weights.model,
                         "' is by its name an average, which an optimizer "
                         "does not train"),
                  ""};
  }
  for (const std::string& twin : weights.twins) {
    const bool called = IsCalledAs(optimizer, twin, weights.model);
    if (called) return Reason{StrCat("it is the optimizer of '", twin, "'"), ""};
    if (IsAverageKey(twin) || IsCopyKey(twin) || averages.contains(twin)) continue;
    return Reason{StrCat("'", twin, "' has the names and shapes of ", ModelKeyText(weights.model),
                         ", and nothing tells which of the two the optimizer trains"),
                  ""};
  }
  return std::nullopt;
}

// Names what stands beside the dict that was taken in a file of optimizers: it may be a state of
// theirs, and no view shows it.
void LeaveOutBeside(PickleRef root, const std::string& taken, OptimizerChoice& out) {
  for (const auto& [key, value] : root.Items()) {
    const std::string name(key.String().value_or("?"));
    const bool plain = value.Number() || value.Bool() || value.String() || value.IsNone();
    if (plain || taken == name || taken.starts_with(name + ".")) continue;
    const bool tensors =
        AnyNode(value, [](const PickleNode& n) { return n.kind == PickleNode::Kind::kTensor; });
    const LeftOutPart part = tensors ? LeftOutPart::kOptimizer : LeftOutPart::kDocument;
    out.left_out.push_back({part, StrCat("'", name, "'"),
                            StrCat("'", name, "' stands beside '", taken,
                                   "', which alone is read as the state_dict() of an optimizer"),
                            ""});
  }
}

}  // namespace

OptimizerChoice ChooseOptimizer(PickleRef root, const std::string& file,
                                const WeightsFile* weights) {
  const TorchState state(root);
  const auto& found = state.optimizers();
  const std::string whole = StrCat("the optimizer in ", file);
  OptimizerChoice out;
  const auto leave_out = [&](const std::string& what, const Reason& reason) {
    out.left_out.push_back({LeftOutPart::kOptimizer, what, reason.why, reason.remedy});
  };
  if (found.empty()) {
    if (weights == nullptr)
      leave_out(whole, {"it does not hold the state_dict() of an "
                        "optimizer",
                        ""});
    return out;
  }
  for (const TorchState::Part& part : found) {
    const auto why = weights == nullptr ? std::nullopt : WhyNotOurs(root, *weights, part.key);
    const std::string what = part.key.empty() ? whole : StrCat("'", part.key, "'");
    if (found.size() > 1) {
      leave_out(
          what,
          {"the file has several optimizers, and nothing tells which of them trains the model",
           ""});
    } else if (why) {
      leave_out(what, *why);
    } else {
      out.dict = part.value;
      out.key = part.key;
      if (weights == nullptr && !part.key.empty()) LeaveOutBeside(root, part.key, out);
    }
  }
  return out;
}

}  // namespace ckptfs::huggingface
