// SPDX-License-Identifier: Apache-2.0

#include "core/dialect/shown_weight.h"

namespace ckptfs {

std::optional<ShownWeight> WeightOf(const StepModel& step, const Layout& layout,
                                    ParameterIndex parameter) {
  const auto weight = step.FindAtom(parameter, "weight");
  const auto master = step.FindAtom(parameter, "master");
  if (!weight && !master) return std::nullopt;
  const Atom& stored = step.atom(weight ? *weight : *master);
  DType dtype = stored.dtype;
  if (!weight && step.model_dtype) dtype = *step.model_dtype;
  const bool castable = IsFloat(stored.dtype) && step.parameter(parameter).role != Role::kBuffer;
  if (layout.dtype && castable) dtype = *layout.dtype;
  if (weight && (dtype == stored.dtype || !master)) {
    return ShownWeight{*weight, dtype, stored.derived || dtype != stored.dtype};
  }
  return ShownWeight{*master, dtype, true};
}

}  // namespace ckptfs
