// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/key_shape.h"

#include <algorithm>
#include <iterator>

#include "core/base/strings.h"
#include "formats/dcp/source_keys.h"
#include "formats/optimizer/member_order.h"
#include "formats/tools/source_traits.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {
namespace {

std::string WithoutDot(std::string_view prefix) {
  if (prefix.ends_with('.')) prefix.remove_suffix(1);
  return std::string(prefix);
}

void ReadTensors(PickleRef given, KeyShape& keys) {
  for (const auto& [key, tensor] : given.Items()) {
    const auto dtype =
        tensor.IsSequence() && tensor.size() == 2 ? tensor.at(0).String() : std::nullopt;
    const auto known = dtype ? DTypeFromName(*dtype) : std::nullopt;
    auto shape = known ? tensor.at(1).AsShape() : std::nullopt;
    const auto elements = shape ? ElementCount(*shape) : Result<uint64_t>(0);
    if (!elements || *elements != 1 || !key.String()) continue;
    keys.tensors.emplace(*key.String(), std::pair(*known, *std::move(shape)));
  }
}

void ReadKinds(PickleRef given, KeyShape& keys) {
  for (const auto& [kind, path] : given.Items()) {
    std::vector<PathStep> steps;
    for (size_t i = 0; path.IsSequence() && i < path.size(); ++i) {
      const auto text = path.at(i).String();
      const auto index = path.at(i).Int();
      if (text) steps.push_back({std::string(*text), {}});
      if (index) steps.push_back({"", static_cast<uint32_t>(*index)});
    }
    const bool same = kind.String() && KeyOf(steps) == *kind.String();
    if (same) keys.kinds.emplace(*kind.String(), std::move(steps));
  }
}

Result<KeyShape> SourceKeys(const Document& document) {
  KeyShape keys;
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(document));
  const PickleRef given = RootOf(tree);
  keys.model = WithoutDot(given["model"].String().value_or("model"));
  keys.flat = given["flat"].Bool().value_or(false);
  for (const auto& [label, numbers] : given["numbers"].Items()) {
    auto& of_optimizer = keys.numbers[std::string(label.String().value_or(""))];
    for (const auto& [name, number] : numbers.Items()) {
      if (!name.String() || !number.Int()) continue;
      of_optimizer.emplace(*name.String(), static_cast<uint64_t>(*number.Int()));
    }
  }
  const PickleRef optimizers = given["optimizers"];
  for (size_t i = 0; optimizers && i < optimizers.size(); ++i) {
    const std::string key = WithoutDot(optimizers.at(i).String().value_or("optim"));
    if (optimizers.size() == 1) keys.optimizer = key;
    if (optimizers.size() > 1) keys.optimizers.emplace(key, key);
  }
  ReadTensors(given["tensors"], keys);
  ReadKinds(given["kinds"], keys);
  for (const auto& [name, state] : given["state_names"].Items()) {
    if (name.String() && state.String()) keys.state_names.emplace(*name.String(), *state.String());
  }
  return keys;
}

// Returns the shape of keys that the state dict was saved with, if DCP saved it.
Result<KeyShape> SpelledKeys(const StepModel& step) {
  KeyShape keys;
  const Document* source = TraitsOf(step).own_keys ? step.FindDocument(kSourceKeys) : nullptr;
  if (source != nullptr) return SourceKeys(*source);
  const Document* document = step.FindDocument(kSpelling);
  if (document == nullptr) return keys;
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  const PickleRef given = RootOf(tree);
  if (const auto model = given["model"].String()) keys.model = *model;
  keys.flat = given["flat"].Bool().value_or(false);
  for (const auto& [label, key] : given["optimizers"].Items()) {
    if (label.String() && key.String()) {
      keys.optimizers.emplace(std::string(*label.String()), std::string(*key.String()));
    }
  }
  return keys;
}

// As torch.optim.Optimizer.state_dict() counts: through the groups.
Result<KeyShape> NumberedKeys(const StepModel& step) {
  KeyShape keys;
  const Document* source = TraitsOf(step).own_keys ? step.FindDocument(kSourceKeys) : nullptr;
  if (source != nullptr) {
    CKPT_ASSIGN_OR_RETURN(KeyShape own, SourceKeys(*source));
    keys.numbers = std::move(own.numbers);
    if (!keys.numbers.empty()) return keys;
    if (own.flat) {
      return Fail(ErrorCode::kUnsupported,
                  "the optimizer was saved flat, by parameter, which does not say in which order "
                  "it had these");
    }
  }
  CKPT_RETURN_IF_ERROR(CheckMemberOrder(step));
  for (const Group& group : step.groups) {
    auto& numbers = keys.numbers[group.optimizer];
    for (const ParameterIndex p : group.parameters) {
      numbers.try_emplace(step.parameter(p).name, numbers.size());
    }
  }
  return keys;
}

}  // namespace

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

namespace {

Result<KeyShape> KeysAsked(const StepModel& step, ckptfs::StateKeys asked) {
  switch (asked) {
    case ckptfs::StateKeys::kAsSource: return SpelledKeys(step);
    case ckptfs::StateKeys::kNested: break;
    case ckptfs::StateKeys::kFlat: return KeyShape{.flat = true};
    case ckptfs::StateKeys::kTitan:
      return KeyShape{.model = "", .optimizer = "optimizer", .flat = true};
    case ckptfs::StateKeys::kAccelerate: return KeyShape{.optimizer = "optimizer"};
    case ckptfs::StateKeys::kNumbered: return NumberedKeys(step);
  }
  return KeyShape();
}

// Numbers are of the source's own parameters; names that a dialect made have none.
Status CheckNumbers(const StepModel& step, const KeyShape& keys) {
  for (const Group& group : step.groups) {
    if (!keys.numbers.contains(group.optimizer)) continue;
    for (const ParameterIndex p : group.parameters) {
      const std::string& name = step.parameter(p).name;
      if (keys.NumberOf(group.optimizer, name)) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        "the source's optimizer numbers its parameters, and this one has no number"}
                      .OfParameter(name)
                      .Needing("add 'nested' or 'flat' to the layout"));
    }
  }
  return {};
}

}  // namespace

Result<KeyShape> KeysFor(const StepModel& step, ckptfs::StateKeys asked) {
  CKPT_ASSIGN_OR_RETURN(KeyShape keys, KeysAsked(step, asked));
  CKPT_RETURN_IF_ERROR(CheckNumbers(step, keys));
  const Document* source = TraitsOf(step).own_keys ? step.FindDocument(kSourceKeys) : nullptr;
  if (source == nullptr || !keys.state_names.empty()) return keys;
  CKPT_ASSIGN_OR_RETURN(KeyShape own, SourceKeys(*source));  // its live parameters' names
  keys.state_names = std::move(own.state_names);
  return keys;
}

}  // namespace ckptfs::dcp
