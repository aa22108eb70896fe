// SPDX-License-Identifier: Apache-2.0
//
// The source files of a step as they are: source/<path>, or source/root<k>/<path> where two
// roots of the step have a file of one path.
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
