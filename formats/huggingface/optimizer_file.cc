// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/optimizer_file.h"

#include <algorithm>
#include <array>

namespace ckptfs::huggingface {
namespace {

// Trainer's and accelerate's; what is of a second optimizer or model has a number.
constexpr std::array<std::string_view, 2> kNames = {"optimizer.pt", "optimizer.bin"};
constexpr std::array<std::string_view, 4> kSecond = {"optimizer_1.bin", "model_1.safetensors",
                                                     "pytorch_model_1.bin",
                                                     "model_1.safetensors.index.json"};

// "optimizer_1.bin": accelerate numbers what it prepared after the first.
bool IsNumbered(std::string_view name, std::string_view begin, std::string_view end) {
  if (!name.starts_with(begin) || !name.ends_with(end) || name.size() <= begin.size() + end.size())
    return false;
  name = name.substr(begin.size(), name.size() - begin.size() - end.size());
  return std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

std::string OptimizerFileAmong(const std::vector<std::string>& names) {
  const auto has = [&](std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (std::ranges::any_of(kSecond, has)) return "";
  // With both, one is of an earlier save, and which one a Trainer loads is its configuration's.
  if (std::ranges::all_of(kNames, has)) return "";
  const auto name = std::ranges::find_if(kNames, has);
  return name == kNames.end() ? "" : std::string(*name);
}

bool IsOptimizerFile(std::string_view name) {
  return std::ranges::find(kNames, name) != kNames.end() || IsNumbered(name, "optimizer_", ".bin");
}

bool IsOtherModel(std::string_view name) {
  return IsNumbered(name, "model_", ".safetensors") || IsNumbered(name, "pytorch_model_", ".bin");
}

}  // namespace ckptfs::huggingface
