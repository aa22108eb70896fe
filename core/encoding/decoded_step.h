// SPDX-License-Identifier: Apache-2.0
//
// Decode shows a step whose weights are values with a scale per block as one of plain weights: an
// ordinary finished StepModel with the same blobs, in which scales are not tensors.
// Its weights are decoded when they are read (core/view/scaled_atom.h); they are fp32, so that a
// layout's dtype rounds them once.
//
// Thread safety: immutable values; the function is pure.
// Lifetime: a decoded step is independent of the one that it was made of.

#pragma once

#include "core/base/result.h"
#include "core/encoding/encoded_weights.h"
#include "core/model/family.h"

namespace ckptfs {

// kUnsupported names the tensor for which it is not proved how it is encoded, or that lies in
// several pieces.
Result<StepModel> Decode(const StepModel& step, const EncodingConfig& config,
                         const FamilyVariables& sizes, const FamilySet& families);

}  // namespace ckptfs
