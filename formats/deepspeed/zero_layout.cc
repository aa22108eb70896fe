// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/zero_layout.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs::deepspeed {

Status VisitFlatGroup(std::span<const uint64_t> members, std::span<const uint64_t> paddings,
                      uint64_t partition, uint32_t ranks, const ZeroVisitor& visit) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t capacity,
                        CheckedMul(partition, ranks, "elements of a ZeRO group"));
  uint64_t start = 0;
  for (uint32_t member = 0; member < members.size(); ++member) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t stop,
                          CheckedAdd(start, members[member], "elements of a ZeRO group"));
    if (stop > capacity) {
      return Fail(ErrorCode::kInvalid,
                  StrCat("the group's parameters have more elements than the ", ranks,
                         " partitions of ", partition, " that the files hold"));
    }
    for (uint64_t flat = start; flat < stop;) {
      const uint64_t rank = flat / partition;
      const uint64_t until = std::min(stop, (rank + 1) * partition);
      CKPT_RETURN_IF_ERROR(visit(ZeroSpan{member, static_cast<uint32_t>(rank), flat - start,
                                          until - start, flat - rank * partition}));
      flat = until;
    }
    const uint64_t padding = member < paddings.size() ? paddings[member] : 0;
    CKPT_ASSIGN_OR_RETURN(start, CheckedAdd(stop, padding, "elements of a ZeRO group"));
  }
  return {};
}

Result<uint64_t> VisitSubGroup(std::span<const uint64_t> members, uint32_t ranks,
                               const ZeroVisitor& visit) {
  uint64_t at = 0;
  for (uint32_t member = 0; member < members.size(); ++member) {
    const uint64_t elements = members[member];
    const uint64_t slice = CeilDiv(elements, ranks);
    for (uint32_t rank = 0; rank < ranks && slice > 0; ++rank) {
      const uint64_t begin = rank * slice;
      if (begin >= elements) break;
      CKPT_RETURN_IF_ERROR(
          visit(ZeroSpan{member, rank, begin, std::min(elements, begin + slice), at}));
    }
    CKPT_ASSIGN_OR_RETURN(at, CheckedAdd(at, slice, "elements of a ZeRO-3 sub-group"));
  }
  return at;
}

}  // namespace ckptfs::deepspeed
