// SPDX-License-Identifier: Apache-2.0
//
// FindPackedTensor finds a tensor of few bits an element that has scales beside it, by the names
// that quantisers give the two:
//
//   <w>.weight        <w>.weight_scale, .weight_scale_inv, .scale_weight, .scale, .scales, .SCB,
//                     .weight.absmax (compressed-tensors, ModelOpt, DeepSeek, ComfyUI, MLX,
//                     bitsandbytes)
//   <w>.weight_packed <w>.weight_scale (compressed-tensors)
//   <w>.qweight       <w>.scales, .qzeros (GPTQ, AWQ)
//   <w>_blocks        <w>_scales (MXFP4)
//   <w>._data         <w>._scale (quanto)
//
// Its elements are not the weight's, so a cast of them is not the weight in another type.  Numbers
// of 8 bits without scales are plain ones.
//
// Thread safety: pure.
// Lifetime: the name is the step's.

#pragma once

#include <optional>
#include <string_view>

#include "core/model/step_model.h"

namespace ckptfs {

// Its name; nothing if there is none.
std::optional<std::string_view> FindPackedTensor(const StepModel& step);
// The same of a step whose config says that it is quantised: the first weight of few bits an
// element, or of whole numbers, whatever stands beside it.
std::optional<std::string_view> FindNarrowTensor(const StepModel& step);
// The first weight of floats of 8 bits or fewer that has no master.
std::optional<std::string_view> FindByteFloats(const StepModel& step);

}  // namespace ckptfs
