// SPDX-License-Identifier: Apache-2.0
//
// The atoms of a step as files, for inspection and `cp`:
//
//   param/<name>/<kind>.safetensors              one tensor, named as the parameter
//   param/<name>/<optimizer>.<kind>.safetensors  where the optimizer has a name
//   param/<name>/<kind>.bin                      the bare bytes of a dtype that
//                                                safetensors has no name for
//   param/<alias>                                symlink to the parameter's directory
//
// Each is whole: unsharded, unpadded, in the dtype it is stored in.
//
// Thread safety: pure functions.
// Units: bytes.

#pragma once

#include "core/base/result.h"
#include "core/view/plan.h"
#include "fs/tree/mounted_step.h"

namespace ckptfs {

// Atoms whose size cannot be told (a shape that overflows) are left out.
ParamIndex IndexParameters(const StepModel& model);

// Its size equals the index's.
Result<Plan> PlanAtomFile(const StepModel& model, AtomIndex atom);

}  // namespace ckptfs
