// SPDX-License-Identifier: Apache-2.0
//
// MatchConfig compares what a Hugging Face view shows with the config.json that it shows beside it:
// whether from_pretrained finds every tensor of the architecture under these names, and whether the
// config's sizes are those of the tensors.
//
// Thread safety: pure function.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/huggingface/shown_tensors.h"
#include "formats/tools/config_text.h"

namespace ckptfs::huggingface {

// The origin of the config.json that is shown.
enum class ConfigSource : uint8_t {
  kWithWeights,  // it lies beside weights whose files are called as save_pretrained calls them
  kElsewhere,    // it lies above them, or beside a file of a script; or the user gives it
};

// The source of the config.json that the step carries.
ConfigSource CarriedConfigOf(const StepModel& step, const ConfigFacts& facts);

// Transformers loads what it saved itself, with names that nobody else knows; so of weights that
// lie with their config.json only those are refused of which it would load nothing.
//
// Lines of what from_pretrained takes no notice of, as View::LeftOut has them; one that says that
// nothing was compared where the architecture is not known.  kUnsupported where it would begin
// tensors with random values, or fail.
Result<std::vector<std::string>> MatchConfig(const StepModel& step, const ConfigFacts& facts,
                                             std::span<const ShownTensor> tensors,
                                             ConfigSource source);

}  // namespace ckptfs::huggingface
