// SPDX-License-Identifier: Apache-2.0
//
// StepChanges remembers which steps came and went lately, so that code that shows
// steps takes in what is new and need not compare all there are.
//
// Thread safety: none; its owner's lock.
// Lifetime: keeps the last kKept changes.

#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "core/store/store.h"

namespace ckptfs {

class StepChanges {
 public:
  static constexpr size_t kKept = 4096;

  void Add(StepChange change);
  // From now on no caller of the past knows what there is.
  void Forget();

  // Counts all changes ever.
  uint64_t generation() const { return generation_; }
  // Those after `generation`; nothing if they are not all kept.
  std::optional<std::vector<StepChange>> Since(uint64_t generation) const;

 private:
  // Not 0: a caller that has seen nothing yet has not seen everything.
  uint64_t generation_ = 1;
  std::deque<StepChange> kept_;  // the last is number generation_
};

}  // namespace ckptfs
