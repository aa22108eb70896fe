// SPDX-License-Identifier: Apache-2.0
//
// Prints of values: two tensors have equal prints where one is the other, cast to a weight's type,
// by the rules of core/check/weight_check.h (any NaNs are equal, as are zeros and what is too small
// for a normal fp32 number).  A sample is of up to 4,096 elements in blocks that are spread over
// the tensor, its first and last ones among them.
//
// Thread safety: pure but for reading.
// Units: elements; offsets are bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/tensor/dtype.h"
#include "formats/dcp/stored_state.h"

namespace ckptfs::megatron {

// A tensor's elements one after the other, as they lie in files.
struct FlatTensor {
  struct Run {
    uint32_t file = 0;  // of the metadata's
    uint64_t offset = 0;
    uint64_t elements = 0;
  };
  DType dtype = DType::kF32;
  std::vector<Run> runs;
  uint64_t Elements() const;
};

enum class PrintOf { kSample, kAll };
// A sample of so many elements is all of them.
inline constexpr uint64_t kSampleElements = 4096;

// True if masters of type `from` can be compared with weights of type `as`.
bool CanPrint(DType from, DType as);

// The prints of `count` tensors, which `make` gives one after the other, as weights of type `as`.
// REQUIRES: CanPrint of each.  BLOCKS: on reading; a few MiB are in memory at a time.
Result<std::vector<Digest>> PrintsOf(const dcp::StoredState& state, size_t count,
                                     const std::function<FlatTensor(size_t)>& make, DType as,
                                     PrintOf what);

}  // namespace ckptfs::megatron
