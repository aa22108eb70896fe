// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/rank_counts.h"

#include <algorithm>

#include "core/base/strings.h"

namespace ckptfs {

Status RankCounts::Enter(int peer) {
  const auto found = of_.find(peer);
  const size_t its = peer == 0 || found == of_.end() ? 0 : found->second;
  if (all_ >= most_ || its >= std::max<size_t>(1, most_ / 2)) {
    return Fail(ErrorCode::kExists,
                StrCat("too many ranks", all_ >= most_ ? "" : " of one process"));
  }
  ++all_;
  ++of_[peer];
  return {};
}

void RankCounts::Leave(int peer) {
  --all_;
  const auto found = of_.find(peer);
  if (--found->second == 0) of_.erase(found);
}

}  // namespace ckptfs
