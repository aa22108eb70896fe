// SPDX-License-Identifier: Apache-2.0
//
// How ZeRO lays parameters out in the flat partitions of its ranks, as pure
// arithmetic (deepspeed 0.19.7 runtime/zero/stage_1_and_2.py, stage3.py,
// partition_parameters.py).  The order is that of `param_shapes`.
//
//   stages 1, 2   group = p0 | pad0 | p1 | pad1 ... | zeros at the end, cut into
//                 `ranks` partitions of `partition` elements
//   stage 3       each parameter is cut alone: rank r holds elements
//                 [r c, (r+1) c), c = ceil(n / ranks); a sub-group is the
//                 concatenation of its parameters' slices of c elements
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "core/base/result.h"

namespace ckptfs::deepspeed {

// Elements [begin, end) of parameter `member` of the group lie in the
// partition of `rank` from `at` on.
struct ZeroSpan {
  uint32_t member = 0;
  uint32_t rank = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t at = 0;
};

using ZeroVisitor = std::function<Status(const ZeroSpan&)>;

// `paddings` (per parameter, elements after it) may be empty.  Calls in
// member order, ranks ascending, up to the first that fails.  kInvalid if the
// partitions are too small.
Status VisitFlatGroup(std::span<const uint64_t> members, std::span<const uint64_t> paddings,
                      uint64_t partition, uint32_t ranks, const ZeroVisitor& visit);

// The size of a stage-3 sub-group's partition is returned.
Result<uint64_t> VisitSubGroup(std::span<const uint64_t> members, uint32_t ranks,
                               const ZeroVisitor& visit);

}  // namespace ckptfs::deepspeed
