// SPDX-License-Identifier: Apache-2.0
//
// CastMatch tells whether a master, cast, may be a weight, by the rules of
// core/check/weight_check.h.  Up to 4,096 elements are compared, in blocks that are spread over the
// tensor, its first and last ones among them: one that differs refutes it.
//
// Thread safety: pure but for reading.
// Units: elements.

#pragma once

#include <cstdint>

#include "core/base/result.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::megatron {

// A tensor and the file that it lies in, which must outlive it.
struct TensorIn {
  const TorchFile* file = nullptr;
  const FileTensor* tensor = nullptr;
};

// True if elements [at, at + elements of the weight) of the master may be the weight's.  False if
// there are not so many, or one of the two types cannot be cast to the other.
// kInvalid for a weight whose elements are not in their order.  BLOCKS: on reading the samples.
Result<bool> MayBeCast(TensorIn master, uint64_t at, TensorIn weight);

}  // namespace ckptfs::megatron
