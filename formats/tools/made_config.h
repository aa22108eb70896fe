// SPDX-License-Identifier: Apache-2.0
//
// A source may make the config.json that a step carries of what the job itself says
// (formats/megatron/args_config.h).  It counts less than one that somebody gives (mount
// --hf-config), who may know what no argument says: the ids of the tokenizer.
//
//   document "made_config" = True
//
// Thread safety: pure functions.

#pragma once

#include <optional>
#include <string_view>

#include "core/model/step_model.h"
#include "formats/tools/model_files.h"

namespace ckptfs {

inline constexpr std::string_view kMadeConfig = "made_config";

// True if the step's config.json lay nowhere as a file.
inline bool HasMadeConfig(const StepModel& step) {
  return step.FindDocument(kMadeConfig) != nullptr;
}

// The files to show or ask: the step's own, `given` where it has none or its config was made.
inline const ModelFiles& ChosenModelFiles(const StepModel& step, const ModelFiles& own,
                                          const std::optional<ModelFiles>& given) {
  return given && (own.config() == nullptr || HasMadeConfig(step)) ? *given : own;
}

}  // namespace ckptfs
