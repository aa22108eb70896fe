// SPDX-License-Identifier: Apache-2.0
//
// How many steps an optimizer has taken of each parameter.  torch's optimizers count by
// parameter; DeepSpeed's keep one count per group, and ZeRO-3 one for all.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// The number that these bytes of one element are, little-endian; nothing for another dtype.
std::optional<double> NumberOf(DType dtype, std::string_view bytes);
// The same if it counts something: whole, not negative, below 10^15.
std::optional<uint64_t> CountOf(DType dtype, std::string_view bytes);

// The number that an atom in the manifest is; nothing if it is in a file, or none.
std::optional<double> NumberOf(const Atom& atom);

// The parameter's `step`; nothing if it has no count of its own.
std::optional<double> StepsOf(const StepModel& step, ParameterIndex parameter);

// kUnsupported names two of the parameters whose counts differ, for a target that keeps
// one for all of them ("one group"); those without a count agree with any.
Status CheckOneStep(const StepModel& step, std::span<const ParameterIndex> parameters);
// The step counts of the parameters of all groups.
Status CheckOneStep(const StepModel& step);

}  // namespace ckptfs
