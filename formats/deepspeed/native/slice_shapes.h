// SPDX-License-Identifier: Apache-2.0
//
// Model states without param_shapes: an engine in bf16 that has a partitioned optimizer without
// ZeRO (BF16_Optimizer, the default of pipelines in bf16) writes none.  Its ranks' optimizer files
// say which parameter lies where in the partitions (`param_slice_mappings`), and its weights what
// shape it has.
//
// Thread safety: as the value that it changes.

#pragma once

#include "core/base/result.h"
#include "formats/deepspeed/native/parsed.h"

namespace ckptfs::deepspeed::native {

// Gives the models of such engines the shapes of their groups.  Others are not changed, nor are
// those of files that have no slices either.  kInvalid: slices that contradict each other;
// kUnsupported: a parameter whose shape no weight tells.
Status TakeShapesFromSlices(Parsed& parsed);

}  // namespace ckptfs::deepspeed::native
