// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/trainer_rule.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/print_value.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kArguments = "training_args.bin";
constexpr uint64_t kDecay = 1;  // bit of the first group
constexpr uint64_t kOther = 2;  // of the second
constexpr std::string_view kWeightDecay = "weight_decay";

std::string Lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return out;
}

// r"(?:^|\.)norm(?:$|\.)" and r"_norm(?:$|\.)": a part between dots is "norm" or ends in "_norm".
bool HasNormPart(std::string_view name) {
  while (!name.empty()) {
    const size_t end = std::min(name.find('.'), name.size());
    const std::string_view part = name.substr(0, end);
    if (part == "norm" || part.ends_with("_norm")) return true;
    name.remove_prefix(std::min(end + 1, name.size()));
  }
  return false;
}

uint64_t GroupsOf(const OwnableParameter& parameter) {
  const std::string name = Lower(parameter.name);
  const auto has = [&](std::string_view word) { return name.find(word) != std::string::npos; };
  if (has("bias")) return kOther;
  const bool norm = has("layernorm") || has("rmsnorm") || HasNormPart(name);
  return norm || parameter.shape.size() < 2 ? kDecay | kOther : kDecay;
}

// True if two numbers, or sequences of them, are equal; true where one is not there.
bool Agree(PickleRef a, PickleRef b) {
  if (!a || !b || a.IsNone() || b.IsNone()) return true;
  const auto left = a.Number();
  return left && left == b.Number();
}

// Returns what the groups have but for their members and decay, by key, as text.
std::optional<std::map<std::string, std::string>> Common(PickleRef group) {
  std::map<std::string, std::string> out;
  for (const auto& [key, value] : group.Items()) {
    const auto name = key.String();
    if (!name) return std::nullopt;
    if (*name == "params" || *name == kWeightDecay) continue;
    auto text = PrintValue(value);
    if (!text) return std::nullopt;
    out.emplace(*name, *std::move(text));
  }
  return out;
}

// A setting of an optimizer that Trainer makes where `optim` is this, and that no optimizer of
// its class has unless it is asked for.
struct Mark {
  std::string_view optim;
  std::string_view key;
  bool value;
};
constexpr std::array<Mark, 3> kMarks = {{{"adamw_torch_fused", "fused", true},
                                         {"adafactor", "relative_step", false},
                                         {"adafactor", "scale_parameter", false}}};

// OptimizerNames of transformers, or its text.
std::string_view NameOfOptimizer(PickleRef optim) {
  if (const auto text = optim.String()) return *text;
  const PickleRef arguments = optim.Arguments();
  const bool one = arguments && arguments.IsSequence() && arguments.size() == 1;
  return one ? arguments.at(0).String().value_or("") : "";
}

// True if a group has the marks of the optimizer that Trainer would make, of which there are some.
bool HasMarks(PickleRef arguments, PickleRef group) {
  const std::string_view name = NameOfOptimizer(arguments["optim"]);
  bool any = false;
  for (const Mark& mark : kMarks) {
    if (mark.optim != name) continue;
    if (group[mark.key].Bool() != mark.value) return false;
    any = true;
  }
  return any;
}

// Trainer gives its groups their decay, and nothing else: torch keeps that before the defaults.
bool BeginsWithDecay(PickleRef group) {
  for (const auto& [key, value] : group.Items()) {
    if (key.String() != "params") return key.String() == kWeightDecay;
  }
  return false;
}

bool AreTrainers(PickleRef arguments, PickleRef decayed, PickleRef others) {
  const auto decay = decayed[kWeightDecay].Number();
  const bool known = arguments["optim"] && arguments["learning_rate"].Number() && decay &&
                     decay == arguments[kWeightDecay].Number() &&
                     others[kWeightDecay].Number() == 0.0;
  if (!known || !HasMarks(arguments, decayed) || !BeginsWithDecay(decayed)) return false;
  const auto common = Common(decayed);
  if (!common || common != Common(others)) return false;
  const PickleRef betas = decayed["betas"];
  const bool two = betas && betas.IsSequence() && betas.size() == 2;
  // Every Trainer has a scheduler, and schedulers note the rate that they begin with.
  return decayed["initial_lr"].Number() == arguments["learning_rate"].Number() &&
         (!two || (Agree(betas.at(0), arguments["adam_beta1"]) &&
                   Agree(betas.at(1), arguments["adam_beta2"]))) &&
         (!two || Agree(decayed["eps"], arguments["adam_epsilon"]));
}

}  // namespace

std::optional<ToolRule> TrainerRule(const StepCandidate& step,
                                    std::span<const std::string> hyper_parameters,
                                    std::span<const OwnableParameter> parameters) {
  if (hyper_parameters.size() != 2) return std::nullopt;
  auto opened = step.root->Open(JoinPath(step.Own(), kArguments));
  if (!opened) return std::nullopt;
  const auto file = TorchFile::Open(*std::move(opened));
  if (!file) return std::nullopt;
  const auto decayed = ParsePickle(hyper_parameters[0]);
  const auto others = ParsePickle(hyper_parameters[1]);
  if (!decayed || !others ||
      !AreTrainers(file->root(), RootOf(decayed->tree), RootOf(others->tree))) {
    return std::nullopt;
  }
  ToolRule rule{"transformers' Trainer", {}};
  for (const OwnableParameter& parameter : parameters) rule.groups.push_back(GroupsOf(parameter));
  return rule;
}

}  // namespace ckptfs
