// SPDX-License-Identifier: Apache-2.0

#include "core/view/whole_atom.h"

#include <memory>
#include <utility>

namespace ckptfs {

Result<Plan> PlanOfWholeAtom(const StepModel& model, AtomIndex atom, DType dtype) {
  const Shape& shape = model.atom(atom).shape;
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(shape));
  PlanBuilder builder;
  builder.Atom(atom, std::make_shared<const LocalTensor>(WholeTensor(shape)), 0, elements, dtype);
  Plan plan = std::move(builder).Finish();
  CKPT_RETURN_IF_ERROR(plan.Validate(model));
  return plan;
}

}  // namespace ckptfs
