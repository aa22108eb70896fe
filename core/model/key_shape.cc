// SPDX-License-Identifier: Apache-2.0

#include "core/model/key_shape.h"

#include <algorithm>
#include <iterator>

#include "core/base/strings.h"

namespace ckptfs {

std::string KeyOf(const std::vector<PathStep>& path) {
  std::string key;
  for (const PathStep& step : path) {
    if (!key.empty()) key += '.';
    key += step.index ? std::to_string(*step.index) : step.text;
  }
  return key;
}

std::vector<PathStep> Below(std::string_view key, std::vector<PathStep> steps) {
  std::vector<PathStep> path;
  while (!key.empty()) {
    const size_t dot = std::min(key.find('.'), key.size());
    path.push_back({std::string(key.substr(0, dot)), {}});
    key.remove_prefix(std::min(dot + 1, key.size()));
  }
  path.insert(path.end(), std::make_move_iterator(steps.begin()),
              std::make_move_iterator(steps.end()));
  return path;
}

const std::string& KeyShape::OptimizerKey(const std::string& label) const {
  const auto found = optimizers.find(label);
  return found == optimizers.end() ? optimizer : found->second;
}

std::optional<uint64_t> KeyShape::NumberOf(const std::string& label,
                                           const std::string& name) const {
  const auto of_optimizer = numbers.find(label);
  if (of_optimizer == numbers.end()) return std::nullopt;
  const auto found = of_optimizer->second.find(name);
  return found == of_optimizer->second.end() ? std::nullopt : std::optional(found->second);
}

std::vector<PathStep> KeyShape::ModelPath(const std::string& name) const {
  return Below(model, {{name, {}}});
}

std::vector<PathStep> KeyShape::StatePath(const std::string& label, const std::string& name,
                                          const std::string& kind) const {
  const auto deep = kinds.find(kind);
  std::vector<PathStep> steps;
  if (deep == kinds.end()) {
    steps.push_back({kind, {}});
  } else {
    steps = deep->second;
  }
  if (flat) {
    steps.front().text = StrCat("state.", name, ".", steps.front().text);
  } else {
    steps.insert(steps.begin(), {{"state", {}}, {name, {}}});
  }
  return Below(OptimizerKey(label), std::move(steps));
}

}  // namespace ckptfs
