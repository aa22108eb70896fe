// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/fsdp/keys.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs::megatron {
namespace {

constexpr std::string_view kModel = "model.";
constexpr std::string_view kOptimizer = "optimizer.";
constexpr std::string_view kState = "state.";
constexpr std::string_view kGroups = "param_to_group_meta.";
constexpr std::string_view kWrapper = "module.";

constexpr std::string_view kGateEnding = "_w";
constexpr std::string_view kUpEnding = "_v";

std::string_view WithoutWrappers(std::string_view name) {
  while (name.starts_with(kWrapper)) name.remove_prefix(kWrapper.size());
  return name;
}

// "mlp.experts.local_experts.3.linear_fc1.weight": takes "<number>." off the front.
bool TakeNumber(std::string_view& text) {
  const size_t digits = static_cast<size_t>(std::ranges::find_if_not(text, IsDigit) - text.begin());
  if (digits == 0) return false;
  text.remove_prefix(digits);
  return true;
}

bool Take(std::string_view& text, std::string_view front) {
  if (!text.starts_with(front)) return false;
  text.remove_prefix(front.size());
  return true;
}

// Returns the text behind the last ".mlp."; "" where there is none.
std::string_view InsideMlp(std::string_view name) {
  constexpr std::string_view kMlp = ".mlp.";
  const size_t at = name.rfind(kMlp);
  return at == name.npos ? std::string_view() : name.substr(at + kMlp.size());
}

}  // namespace

FsdpKey FsdpKeyOf(std::string_view key) {
  FsdpKey out{FsdpKey::Of::kOther, key, {}};
  std::string_view rest = key;
  if (Take(rest, kModel)) {
    rest = WithoutWrappers(rest);
    if (!rest.empty()) out = {FsdpKey::Of::kModel, rest, {}};
    return out;
  }
  if (!Take(rest, kOptimizer)) return out;
  out.of = FsdpKey::Of::kOptimizer;
  const bool state = Take(rest, kState);
  if (!state && !Take(rest, kGroups)) return out;
  rest = WithoutWrappers(rest);
  const size_t dot = rest.rfind('.');
  if (dot == rest.npos || dot == 0 || dot + 1 == rest.size()) return out;
  return {state ? FsdpKey::Of::kState : FsdpKey::Of::kGroup, rest.substr(0, dot),
          rest.substr(dot + 1)};
}

bool IsHalvable(std::string_view name) {
  std::string_view rest = InsideMlp(name);
  if (Take(rest, "experts.")) {
    const bool local = Take(rest, "local_experts.");
    if (local && !(TakeNumber(rest) && Take(rest, "."))) return false;
    if (!Take(rest, "linear_fc1.") || !(Take(rest, "weight") || Take(rest, "bias"))) return false;
    return (local || TakeNumber(rest)) && rest.empty();
  }
  Take(rest, "shared_experts.");
  return rest == "linear_fc1.weight" || rest == "linear_fc1.bias";
}

HalvedName HalvedNameOf(std::string_view name) {
  const bool gate = name.ends_with(kGateEnding);
  if (!gate && !name.ends_with(kUpEnding)) return {name, FsdpHalf::kAll};
  const std::string_view of = name.substr(0, name.size() - kGateEnding.size());
  if (!IsHalvable(of)) return {name, FsdpHalf::kAll};
  return {of, gate ? FsdpHalf::kGate : FsdpHalf::kUp};
}

}  // namespace ckptfs::megatron
