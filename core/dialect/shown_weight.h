// SPDX-License-Identifier: Apache-2.0
//
// ShownWeight is the atom that a layout shows a parameter's weight from, and as
// what: as stored; where the layout asks for another dtype, from the master if
// there is one, so that nothing is rounded twice.  Buffers are never cast.
//
// Thread safety: pure.
// Lifetime: refers to the step by index.

#pragma once

#include <optional>

#include "core/model/layout.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct ShownWeight {
  AtomIndex atom{};
  DType dtype = DType::kF32;
  bool derived = false;  // not stored so by the source
};

// Nothing if the step holds neither a weight nor a master.
std::optional<ShownWeight> WeightOf(const StepModel& step, const Layout& layout,
                                    ParameterIndex parameter);

}  // namespace ckptfs
