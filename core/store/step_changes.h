// SPDX-License-Identifier: Apache-2.0
//
// StepChanges remembers which steps came and went lately, so that who shows
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
  // Nobody who asks knows what there is.
  void Forget();

  // Counts all changes ever.
  uint64_t generation() const { return generation_; }
  // Those after `generation`; nothing if they are not all kept.
  std::optional<std::vector<StepChange>> Since(uint64_t generation) const;

 private:
  // Not 0: who has seen nothing yet is not who has seen everything.
  uint64_t generation_ = 1;
  std::deque<StepChange> kept_;  // the last is number generation_
};

}  // namespace ckptfs
