// SPDX-License-Identifier: Apache-2.0
//
// Last stage: everything under its atoms.
//
// Thread safety: one call builds one step.

#pragma once

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"
#include "formats/deepspeed/native/named.h"
#include "formats/deepspeed/native/parsed.h"
#include "formats/deepspeed/native/sharded.h"
#include "formats/sharding/placer.h"

namespace ckptfs::deepspeed::native {

// `assembler`: which the files were registered with.  Errors: kInvalid names file
// and parameter where partitions do not hold what their names need, or ranks
// contradict each other; then whatever the proof of coverage finds.
Result<StepModel> Place(const TagFiles& files, const Parsed& parsed, const Named& named,
                        const Sharded& sharded, Assembler assembler);

// The part of it that is masters and optimizer states, of all groups of `named`.
// `header` gets what is left out.
Status PlaceOptimizer(const Parsed& parsed, const Named& named, Placer& placer, StepModel& header);

}  // namespace ckptfs::deepspeed::native
