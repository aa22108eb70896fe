// SPDX-License-Identifier: Apache-2.0
//
// LeaveOutUnreadFiles names files of tensors that lie beside a directory's weights, and that
// nothing is read of: optimizers that no tool of transformers calls so (torchtune's
// recipe_state/recipe_state.pt, a script's own training_state.pt), and other models or parts of
// this one (value_head.safetensors, LLaVA's non_lora_trainables.bin).  What a file holds decides,
// not its name.
//
// Thread safety: pure but for the files that are read.

#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/step_model.h"
#include "formats/huggingface/reader.h"

namespace ckptfs::huggingface {

// `root`: what files.prefix is below.  Passes over what cannot be read, and what is not torch's.
// BLOCKS: on reading a few small pickles and headers.
Status LeaveOutUnreadFiles(const StepFiles& files, const Root& root, StepModel& header);

// Names each of the files that has an optimizer, and says `why` it is not read.  `directory`: of
// the names, below the root.  Passes over what cannot be read.  BLOCKS: on a few small pickles.
Status LeaveOutOptimizers(const Root& root, const std::string& directory,
                          std::span<const std::string> names, std::string_view why,
                          StepModel& header);
// Names each of the files that has a model, but for those that loaders look for by their names.  As
// LeaveOutOptimizers.
Status LeaveOutModels(const Root& root, const std::string& directory,
                      std::span<const std::string> names, std::string_view why, StepModel& header);
// Names the adapters in folders: PEFT saves those of a model but the first below the first one's.
// BLOCKS: on looking into the folders.
Status LeaveOutAdapters(const StepFiles& files, const Root& root, StepModel& header);

}  // namespace ckptfs::huggingface
