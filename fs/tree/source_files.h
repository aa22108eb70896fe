// SPDX-License-Identifier: Apache-2.0
//
// The source files of a step as they are: source/<path> where the step has one
// root, source/root<k>/<path> where it has several.
//
// Thread safety: pure functions.

#pragma once

#include "core/base/result.h"
#include "core/view/plan.h"
#include "fs/tree/mounted_step.h"

namespace ckptfs {

// "" is source/ itself.  If the paths of two blobs exclude each other (one is a
// directory of the other), the first is shown.
SourceIndex IndexSources(const StepModel& model);

Result<Plan> PlanSourceFile(const StepModel& model, BlobIndex blob);

}  // namespace ckptfs
