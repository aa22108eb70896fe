// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/whole_states.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/strings.h"
#include "core/state/state_fit.h"

namespace ckptfs::deepspeed {
namespace {

// The reason names the kind and not the parameter, so that a kind is one line for all parameters.
void LeaveStateOut(const std::string& kind, const StatesAt& at, std::string_view how,
                   std::string_view why, StepModel& header) {
  LeaveOut(header,
           {LeftOutPart::kOptimizer, StrCat("optimizer state '", kind, "' of '", at.name, "'", how),
            StrCat("state '", kind, "' ", why), ""});
}

Status PlaceTensor(const NamedTensor& entry, const StatesAt& at, Placer& placer,
                   StepModel& header) {
  const Shape& shape = entry.tensor.shape();
  const auto fit = FitOf(entry.name, shape, at.shape);
  if (!fit) {
    LeaveStateOut(
        entry.name, at,
        StrCat(" (", ShapeToString(shape), ", the parameter ", ShapeToString(at.shape), ")"),
        "has a shape that does not follow from that of its parameter", header);
    return {};
  }
  if (*fit == Relation::kSame) {
    return placer.AddTensor(at.parameter, entry.name, entry.tensor, at.holder);
  }
  if (at.part) {
    LeaveStateOut(entry.name, at, "",
                  "has a shape of its own, but tensor-parallel ranks hold parts of it", header);
    return {};
  }
  return placer.AddReduced(at.parameter, entry.name, entry.tensor);
}

}  // namespace

Status PlaceWholeStates(const PartitionStates& states, const StatesAt& at, Placer& placer,
                        StepModel& header) {
  const auto refused = [&](const std::string& kind) {
    if (!IsOurs(kind)) return false;
    LeaveStateOut(kind, at, "", "has a name that ckptfs uses for something else", header);
    return true;
  };
  for (const NamedTensor& entry : states.flat) {
    if (refused(entry.name)) continue;
    CKPT_RETURN_IF_ERROR(PlaceTensor(entry, at, placer, header));
  }
  for (const NamedScalar& scalar : states.scalars) {
    if (refused(scalar.name)) continue;
    CKPT_RETURN_IF_ERROR(placer.AddScalar(at.parameter, scalar.name, scalar.value));
  }
  for (const std::string& opaque : states.opaque) {
    if (std::ranges::find(states.nothing, opaque) != states.nothing.end()) continue;
    LeaveStateOut(opaque, at, "", "is neither a plain tensor nor a number", header);
  }
  return {};
}

}  // namespace ckptfs::deepspeed
