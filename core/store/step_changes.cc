// SPDX-License-Identifier: Apache-2.0
#include "core/store/step_changes.h"

namespace ckptfs {

void StepChanges::Add(StepChange change) {
  kept_.push_back(std::move(change));
  ++generation_;
  if (kept_.size() > kKept) kept_.pop_front();
}

void StepChanges::Forget() {
  kept_.clear();
  ++generation_;
}

std::optional<std::vector<StepChange>> StepChanges::Since(uint64_t generation) const {
  if (generation > generation_ || generation_ - generation > kept_.size()) return std::nullopt;
  return std::vector<StepChange>(kept_.end() - static_cast<ptrdiff_t>(generation_ - generation),
                                 kept_.end());
}

}  // namespace ckptfs
