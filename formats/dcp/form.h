// SPDX-License-Identifier: Apache-2.0
//
// Form is a row of the DCP source: a directory that torch.distributed.checkpoint wrote, and whose
// keys are spelled by another library, so that the rules of formats/dcp/state_keys.h would take
// them for something else.  The library's own reader makes the step.
//
// Thread safety: values; the functions may be called concurrently.
// Lifetime: what the functions are given is valid while they run.

#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "formats/dcp/stored_state.h"

namespace ckptfs::dcp {

struct Form {
  // True if the step's state is of this form.  BLOCKS: on reading objects.
  std::function<Result<bool>(StoredState& state)> is;
  // Makes the step of it.  `state` has added its files to the assembler, which is consumed.
  // Errors name the step.
  std::function<Result<StepModel>(const StepCandidate& step, const SourceOptions& options,
                                  StoredState& state, Assembler& assembler)>
      read;
  // The name of the directory that the library's own pointer in a save directory names; nothing
  // without one.
  std::function<Result<std::optional<std::string>>(const Root& root, const std::string& save)>
      latest;
};

}  // namespace ckptfs::dcp
