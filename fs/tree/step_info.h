// SPDX-License-Identifier: Apache-2.0
//
// info.json of a step (what it is) and of a layout (who can show it), and what view/ says of
// the layouts that it does not list: README.txt for people, layouts.json for programs.
//
// Thread safety: pure functions; the same input gives the same bytes.

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "core/store/store.h"
#include "core/view/layout_survey.h"
#include "core/view/view_set.h"

namespace ckptfs {

// run, step, iteration, framework, layout, parameters by role, bytes by kind,
// documents, groups, roots, notes.
std::string RenderStepInfo(const Step& step);

// [{"layout", "formats", "code", "reason", "parameter", "needs"}], one per cause; the last two
// null where nothing is known.
nlohmann::ordered_json RefusalsJson(const LayoutOffer& offer);

// [{"layout", "format", "what"}]: what the step has and a view of it does not.
nlohmann::ordered_json LeftOutJson(const LayoutOffer& offer);

// run, step, layout, world, per format "yes" or the reason why not, these as RefusalsJson, and
// LeftOutJson.
std::string RenderLayoutInfo(const StepRecord& record, const LayoutOffer& offer);

// Says what is here, which usual layouts work, and what the others need.  Safe for a
// terminal.
std::string RenderViewReadme(const Step& step, const LayoutSurvey& survey);
// {"run", "step", "source_layout", "layouts": {name: {"world", "formats": [...], "refused":
// RefusalsJson, "left_out": LeftOutJson}}}
std::string RenderLayoutIndex(const Step& step, const LayoutSurvey& survey);

}  // namespace ckptfs
