// SPDX-License-Identifier: Apache-2.0
//
// Copies of an atom as atoms of their own, so that a plan can read each of them.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <utility>

#include "core/model/step_model.h"

namespace ckptfs {

// The files and parameters of the step, for atoms to be added to.
StepModel WithoutAtoms(const StepModel& step);

// Adds each copy of a replicated or averaged atom.  Returns the numbers that they have: [first,
// end).
std::pair<uint32_t, uint32_t> AddCopies(const Atom& atom, StepModel& split);

}  // namespace ckptfs
