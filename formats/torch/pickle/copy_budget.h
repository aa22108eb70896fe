// SPDX-License-Identifier: Apache-2.0
//
// CopyBudget bounds what a reader copies out of a PickleTree.  A tree shares what the pickle
// mentions twice, and a reader copies it at each mention: `[group] * 1000` is 2 KB more of
// pickle and a thousand copies of the group.  What is copied may be kTimes what the tree holds.
//
// Thread safety: none.
// Lifetime: does not keep the tree.
// Units: words, of which a value has one, and one more for each value that it refers to and
// each byte of its text.

#pragma once

#include <cstdint>

#include "core/base/result.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

class CopyBudget {
 public:
  static constexpr uint64_t kTimes = 8;
  // Files that are small may copy as much, whatever they hold.
  static constexpr uint64_t kAlways = uint64_t{1} << 20;

  explicit CopyBudget(const PickleTree& tree);

  // kInvalid, once more than the budget would be copied; charge before the copy is made.
  Status Charge(uint64_t words);
  // A value and all that it refers to.  Takes time in proportion to what it charges.
  Status ChargeDeep(PickleRef value);
  // A string; nothing for other values.
  Status ChargeText(PickleRef text);

  uint64_t left() const { return left_; }

 private:
  uint64_t left_;
};

}  // namespace ckptfs
