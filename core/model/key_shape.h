// SPDX-License-Identifier: Apache-2.0
//
// KeyShape is where a state dict of torch.distributed.checkpoint has what: the keys of the
// model, of each optimizer, of states and of hyper-parameters.  A step keeps that of its source
// (StepFacts::keys); a view may be asked for another.
//
// Thread safety: values; pure functions.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor/dtype.h"
#include "core/tensor/shape.h"

namespace ckptfs {

// A key of a dict, or an index of a list.
struct PathStep {
  std::string text;
  std::optional<uint32_t> index;
  bool operator==(const PathStep&) const = default;
};

// The key that a path has: its steps, joined by dots.
std::string KeyOf(const std::vector<PathStep>& path);

// Where a state dict has what: keys of dicts in dicts, joined by dots.
struct KeyShape {
  std::string model = "model";  // empty: parameters stand at the top
  std::string optimizer = "optim";
  // The keys of several optimizers, by their labels.
  std::map<std::string, std::string, std::less<>> optimizers = {};
  bool flat = false;  // flatten_optimizer_state_dict
  // For optimizers whose parameters are numbers, as optimizer.state_dict()
  // has them: the number of a name, by the optimizer's label.
  std::map<std::string, std::map<std::string, uint64_t, std::less<>>, std::less<>> numbers = {};
  // Hyper-parameters that are tensors of one element (lr=torch.tensor(..)), by their keys.
  std::map<std::string, std::pair<DType, Shape>, std::less<>> tensors = {};
  // Parameters that an optimizer calls otherwise than the model's part does (PEFT drops the
  // adapter's name from that alone): by the model's name.
  std::map<std::string, std::string, std::less<>> state_names = {};
  // States that stand in dicts or lists ("al.5"): where, below their parameter.
  std::map<std::string, std::vector<PathStep>, std::less<>> kinds = {};
  bool operator==(const KeyShape&) const = default;

  const std::string& OptimizerKey(const std::string& label) const;
  // Below a key that is keys of dicts in dicts: the weight of a name.
  std::vector<PathStep> ModelPath(const std::string& name) const;
  // A parameter's number in an optimizer, if that numbers them; by its name in the step.
  std::optional<uint64_t> NumberOf(const std::string& label, const std::string& name) const;
  // A state; `name` is the parameter's, or its number.
  std::vector<PathStep> StatePath(const std::string& label, const std::string& name,
                                  const std::string& kind) const;
};

// `steps` below a key that is keys of dicts in dicts, joined by dots.
std::vector<PathStep> Below(std::string_view key, std::vector<PathStep> steps);

}  // namespace ckptfs
