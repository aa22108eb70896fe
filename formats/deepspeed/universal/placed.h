// SPDX-License-Identifier: Apache-2.0
//
// The last stage of reading a universal directory: everything in a StateDict, of which Settle
// (formats/settle/settle.h) makes the step.
//
// Thread safety: one call builds one step.

#pragma once

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"
#include "formats/deepspeed/universal/parsed.h"

namespace ckptfs::deepspeed::universal {

// `assembler`: which the files were registered with.  kInvalid names file and
// parameter where param_shapes or the optimizer's state speak of one that has no
// folder; the errors of Settle; then whatever the proof of coverage finds.
Result<StepModel> Place(const Listed& listed, const Parsed& parsed, Assembler assembler);

}  // namespace ckptfs::deepspeed::universal
