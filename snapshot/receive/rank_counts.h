// SPDX-License-Identifier: Apache-2.0
//
// RankCounts knows how many ranks are here, and of which processes.
//
// Thread safety: none; the receiver's thread.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "core/base/result.h"

namespace ckptfs {

class RankCounts {
 public:
  explicit RankCounts(size_t most = SIZE_MAX) : most_(most) {}
  // Counts a rank.  kExists, it may come later, if there are `most`, or one process has half of
  // them.  `peer`: as RankSession::peer; 0 is nobody's.
  Status Enter(int peer);
  void Leave(int peer);
  size_t all() const { return all_; }

 private:
  size_t most_;
  size_t all_ = 0;
  std::map<int, size_t> of_;  // by process
};

}  // namespace ckptfs
