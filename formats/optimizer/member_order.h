// SPDX-License-Identifier: Apache-2.0
//
// CheckMemberOrder tells whether the members of a step's groups are in the order in which the
// optimizer had them: a view that numbers states needs it.
//
// Thread safety: pure.

#pragma once

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// kUnsupported says why nobody knows the order.
Status CheckMemberOrder(const StepModel& step);

}  // namespace ckptfs
