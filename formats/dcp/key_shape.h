// SPDX-License-Identifier: Apache-2.0
//
// The KeyShape of a view: a layout token asks for one; without a token it is that of the source,
// if DCP saved it, else get_state_dict's.
//
// Thread safety: pure function.

#pragma once

#include "core/base/result.h"
#include "core/model/key_shape.h"
#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs::dcp {

// Returns the keys that a layout asks for, or DCP saved the step with, or get_state_dict's.
Result<KeyShape> KeysFor(const StepModel& step, ckptfs::StateKeys asked);

}  // namespace ckptfs::dcp
