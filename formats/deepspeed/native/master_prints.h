// SPDX-License-Identifier: Apache-2.0
//
// PrintsOf compares the fp32 masters of FP16_UnfusedOptimizer with the weights beside them:
// DeepSpeed copies each master, cast, into its weight after every step, so equal prints say which
// weight a numbered master belongs to.  A print is of up to 4,096 elements, in blocks that are
// spread over the tensor; NaNs are one value, and what is zero or too small for a normal
// fp32 number another, since processors may flush it.
//
// Thread safety: pure but for reading the file.

#pragma once

#include <span>

#include "core/base/result.h"
#include "core/state/ownership.h"
#include "formats/deepspeed/model_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed::native {

// `weights`: of the parameters, in their order.  BLOCKS: on reading the samples.
Result<MasterPrints> PrintsOf(const TorchFile& file, const UnshardedOptimizer& optimizer,
                              std::span<const FileTensor* const> weights);

}  // namespace ckptfs::deepspeed::native
