// SPDX-License-Identifier: Apache-2.0
//
// ShownNames are the names under which a layout shows the parameters of a
// step: the canonical ones, or those of the other module structure (naming
// tokens "plain" and "pipe") by the family's rename rule.
//
// Thread safety: immutable values; NamesFor is pure.
// Lifetime: independent of the step.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct ShownNames {
  std::vector<std::string> parameters;  // by ParameterIndex
  // By position in StepModel::aliases; empty: the alias has no name of its own
  // there (a tied layer of a pipeline has one name only).
  std::vector<std::string> aliases;
};

// kUnsupported names the parameter no rename rule covers, or the two that would
// get one name.
Result<ShownNames> NamesFor(const StepModel& step, const Layout& layout);

}  // namespace ckptfs
