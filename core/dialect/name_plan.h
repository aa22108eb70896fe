// SPDX-License-Identifier: Apache-2.0
//
// NamePlan says what becomes of each parameter of a step in another dialect, before anybody looks
// at its atoms: tensors of new names, in the step's order, and the boxes that they consist of.
//
// Thread safety: immutable values; MakeNamePlan is pure.
// Lifetime: refers to the table's rules and to the step by index.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/dialect/dialect.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct RenamedTensor {
  std::string name;
  Shape shape;
  std::vector<ParameterIndex> parts;  // each once
  std::vector<BoxMap> maps;           // `from` is into parts; none: the part is all of it, as it is
  const MapRule* rule = nullptr;      // null: the name stays, too
  uint32_t part = 0;                  // of the rule's `from`, where it is a tensor of the files
  std::optional<uint32_t> expert;     // that the new name has
};

struct NamePlan {
  std::vector<RenamedTensor> tensors;
  std::vector<std::vector<uint32_t>> of_parameter;  // by ParameterIndex: into tensors
  std::vector<std::string> aliases;                 // by position in StepModel::aliases
};

// Heap bytes of the plan, about: what bounds a cache of plans.
uint64_t HeapBytesOf(const NamePlan& plan);

// The side of a rule that a name is spelled as.
struct RuleSide {
  const MapRule* rule = nullptr;
  bool file = false;  // one of `from`; else `to`
  uint32_t part = 0;  // into `from`
  NameHoles holes;
};

// The rules that have the name, as rules see it (NormaliseName), on either side: names of the
// files and of modules may be the same for different rules.
std::vector<RuleSide> SidesOf(std::span<const MapRule* const> rules, std::string_view name);

// From the files' names to the dialect's, or back.  `sizes`: the model's, for rules that need them.
// kInvalid names the tensor whose parts are not all there or do not fit; kUnsupported two tensors
// of one name, and a size that is not known.
Result<NamePlan> MakeNamePlan(const StepModel& step, std::span<const MapRule* const> rules,
                              const FamilyVariables& sizes, bool from_files);

}  // namespace ckptfs
