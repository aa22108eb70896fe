// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/zero_layout.h"

#include <algorithm>

#include "core/base/checked_math.h"

namespace ckptfs::deepspeed {

Status VisitFlatMember(uint64_t start, uint64_t elements, uint64_t partition,
                       const ZeroVisitor& visit) {
  const uint64_t stop = start + elements;
  for (uint64_t flat = start; flat < stop;) {
    const uint64_t rank = flat / partition;
    const uint64_t until = std::min(stop, (rank + 1) * partition);
    CKPT_RETURN_IF_ERROR(visit(ZeroSpan{static_cast<uint32_t>(rank), flat - start, until - start,
                                        flat - rank * partition}));
    flat = until;
  }
  return {};
}

Status VisitSlices(uint64_t elements, uint32_t ranks, uint64_t at, const ZeroVisitor& visit) {
  const uint64_t slice = CeilDiv(elements, ranks);
  for (uint32_t rank = 0; rank < ranks && slice > 0; ++rank) {
    const uint64_t begin = rank * slice;
    if (begin >= elements) break;
    CKPT_RETURN_IF_ERROR(visit(ZeroSpan{rank, begin, std::min(elements, begin + slice), at}));
  }
  return {};
}

}  // namespace ckptfs::deepspeed
