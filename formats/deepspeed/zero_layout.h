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

#include "core/base/result.h"

namespace ckptfs::deepspeed {

// Elements [begin, end) of a parameter lie in the partition of `rank` from `at` on.
struct ZeroSpan {
  uint32_t rank = 0;
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t at = 0;
};

using ZeroVisitor = std::function<Status(const ZeroSpan&)>;

// The spans of a parameter of `elements`, ranks ascending, up to the first that fails.
// Stages 1, 2: it begins at element `start` of the group.  REQUIRES: the partitions hold it.
Status VisitFlatMember(uint64_t start, uint64_t elements, uint64_t partition,
                       const ZeroVisitor& visit);
// Stage 3: its slices begin at element `at` of each rank's sub-group.
Status VisitSlices(uint64_t elements, uint32_t ranks, uint64_t at, const ZeroVisitor& visit);

}  // namespace ckptfs::deepspeed
