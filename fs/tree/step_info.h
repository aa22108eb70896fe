// SPDX-License-Identifier: Apache-2.0
//
// info.json of a step (what it is) and of a layout (who can show it).
//
// Thread safety: pure functions; the same input gives the same bytes.

#pragma once

#include <string>

#include "core/store/store.h"
#include "core/view/view_set.h"

namespace ckptfs {

// run, step, iteration, framework, layout, parameters by role, bytes by kind,
// documents, groups, roots, notes.
std::string RenderStepInfo(const Step& step);

// run, step, layout, world, and per format "yes" or the reason why not.
std::string RenderLayoutInfo(const StepRecord& record, const LayoutOffer& offer);

}  // namespace ckptfs
