// SPDX-License-Identifier: Apache-2.0
//
// Hyper-parameters that torch.optim.Adam and AdamW (2.13) ask for by name and that
// DeepSpeed's own Adams (FusedAdam, DeepSpeedCPUAdam) have no words for, since they
// cannot be otherwise.
//
// Thread safety: pure.

#pragma once

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::dcp {

// A key and its value: True, False or None (nothing).
using ImpliedValue = std::pair<std::string_view, std::optional<bool>>;

// The values that `group`, the dict of one group of a DeepSpeed step, implies and lacks.
// Empty where nothing is implied: for another optimizer, or an Adam without bias
// correction, which torch does not have.  `amsgrad`: there are max_exp_avg_sq.
Result<std::vector<ImpliedValue>> ImpliedValues(const StepModel& step, PickleRef group,
                                                bool amsgrad);

}  // namespace ckptfs::dcp
