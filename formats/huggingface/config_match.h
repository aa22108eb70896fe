// SPDX-License-Identifier: Apache-2.0
//
// MatchConfig compares what a Hugging Face view shows with the config.json that it shows beside it:
// whether from_pretrained finds every tensor of the architecture under these names, and whether the
// config's sizes are those of the tensors.
//
// Thread safety: pure function.

#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/huggingface/shown_tensors.h"
#include "formats/tools/config_text.h"

namespace ckptfs::huggingface {

// Lines of what from_pretrained takes no notice of, as View::LeftOut has them; one that says that
// nothing was compared where the architecture is not known.  kUnsupported where it would begin
// tensors with random values, or fail.
Result<std::vector<std::string>> MatchConfig(const StepModel& step, const ConfigFacts& facts,
                                             std::span<const ShownTensor> tensors);

}  // namespace ckptfs::huggingface
