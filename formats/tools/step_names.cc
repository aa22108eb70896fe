// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/step_names.h"

#include <array>
#include <charconv>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr std::string_view kTrainer = "checkpoint-";
constexpr std::string_view kLightning = ".ckpt";
// Before a number, with or without a separator.
constexpr std::array<std::string_view, 6> kWords = {"checkpoint", "ckpt",  "global_step",
                                                    "step",       "epoch", "iter"};
constexpr std::string_view kSeparators = "-_=";

// All of `text` as a number.
std::optional<uint64_t> Number(std::string_view text) {
  uint64_t number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  return parsed.ec == std::errc() && parsed.ptr == end ? std::optional(number) : std::nullopt;
}

// The digits behind the last "<word>=" of a name such as "epoch=1-step=500-v1".
std::optional<uint64_t> NumberBehind(std::string_view name, std::string_view word) {
  const size_t at = name.rfind(word);
  if (at == std::string_view::npos) return std::nullopt;
  if (at > 0 && kSeparators.find(name[at - 1]) == std::string_view::npos) return std::nullopt;
  name.remove_prefix(at + word.size());
  size_t digits = 0;
  while (digits < name.size() && IsDigit(name[digits])) ++digits;
  return Number(name.substr(0, digits));
}

}  // namespace

std::optional<uint64_t> StepNumber(std::string_view name) {
  if (IsLightningName(name)) name.remove_suffix(kLightning.size());
  // A metric may stand behind them ("epoch=1-step=500-loss=0.25").
  if (const auto step = NumberBehind(name, "step=")) return step;
  if (const auto epoch = NumberBehind(name, "epoch=")) return epoch;
  for (const std::string_view word : kWords) {
    if (!name.starts_with(word)) continue;
    std::string_view rest = name.substr(word.size());
    if (!rest.empty() && kSeparators.find(rest[0]) != std::string_view::npos) rest.remove_prefix(1);
    if (const auto number = Number(rest)) return number;
  }
  return std::nullopt;
}

bool IsTrainerName(std::string_view name) {
  return name.starts_with(kTrainer) && Number(name.substr(kTrainer.size()));
}

bool IsLightningName(std::string_view name) {
  return name.size() > kLightning.size() && name.ends_with(kLightning) && name.front() != '.';
}

}  // namespace ckptfs
