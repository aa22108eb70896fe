// SPDX-License-Identifier: Apache-2.0
//
// Functions that `ls`, `stats` and `diff` share: they choose the tensors that are asked for, and
// name the ranks that hold them.
//
// Thread safety: pure functions.

#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "mount/commands/command.h"

namespace ckptfs {

struct TensorChoice {
  std::string parameter;  // a name or a pattern with * and ?; empty: all
  std::string kind;       // empty: all
};
void AddTensorChoice(Command& command, TensorChoice& choice);

// By the parameter's name (canonical or an alias) and the atom's kind.
bool Chooses(const TensorChoice& choice, const std::string& name, const std::string& kind);
// In the model's order.  kNotFound if none is; it names the nearest.
Result<std::vector<AtomIndex>> ChooseAtoms(const StepModel& model, const TensorChoice& choice);

std::string ShapeText(const std::vector<uint64_t>& shape);  // "[4, 16]"
// {"name", "kind", "optimizer", "shape", "dtype", "bytes"}.
nlohmann::json AtomJson(const StepModel& model, const Atom& atom);
// The ranks of the source that hold it, and the number of files.
nlohmann::json HolderJson(const StepModel& model, const Atom& atom);
std::string HolderText(const nlohmann::json& holder);

}  // namespace ckptfs
