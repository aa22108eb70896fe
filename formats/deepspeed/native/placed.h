// SPDX-License-Identifier: Apache-2.0
//
// Last stage: everything in a StateDict, of which Settle (formats/settle/settle.h) makes the step.
//
// Thread safety: one call builds one step.

#pragma once

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"
#include "core/state/state_dict.h"
#include "formats/deepspeed/native/named.h"
#include "formats/deepspeed/native/parsed.h"

namespace ckptfs::deepspeed::native {

// `assembler`: which the files were registered with.  Errors: kInvalid names file
// and parameter where partitions do not hold what their names need, or ranks
// contradict each other; those of Settle; then whatever the proof of coverage finds.
Result<StepModel> Place(const TagFiles& files, const Parsed& parsed, const Named& named,
                        Assembler assembler);

// Adds masters, optimizer states and groups, of all groups of `named`, to which the states refer.
// `header` gets what is left out.
Status AddOptimizers(const Parsed& parsed, const Named& named, StateDict& dict, StepModel& header);

}  // namespace ckptfs::deepspeed::native
