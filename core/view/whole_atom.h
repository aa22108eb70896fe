// SPDX-License-Identifier: Apache-2.0
//
// PlanOfWholeAtom makes a file of an atom's elements, all of them in order, for those who compare
// or count them.
//
// Thread safety: a pure function.

#pragma once

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/view/plan.h"

namespace ckptfs {

// The plan is valid for the model.
Result<Plan> PlanOfWholeAtom(const StepModel& model, AtomIndex atom, DType dtype);

}  // namespace ckptfs
