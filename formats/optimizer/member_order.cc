// SPDX-License-Identifier: Apache-2.0

#include "formats/optimizer/member_order.h"

#include "core/base/strings.h"
#include "formats/deepspeed/engine_settings.h"
#include "formats/tools/source_traits.h"

namespace ckptfs {
namespace {

template <class... Words>
tl::unexpected<Error> Unknown(const Words&... words) {
  return Fail(ErrorCode::kUnsupported, StrCat(words...));
}

}  // namespace

Status CheckMemberOrder(const StepModel& step) {
  const SourceTraits& traits = TraitsOf(step);
  if (traits.engine && !traits.member_order) {
    return Unknown(
        "a universal directory does not say in which order the optimizer had its "
        "parameters");
  }
  if (step.groups.empty()) return Unknown("the step has no optimizer");
  if (!traits.engine) return {};
  if (step.layout.tp > 1 || step.layout.pp > 1) {
    return Unknown("the step was saved as ", step.layout.ToString(),
                   ": each model-parallel rank has an optimizer of its own");
  }
  for (const Parameter& parameter : step.parameters) {
    if (parameter.expert || parameter.stacked_experts > 0) {
      return Unknown("'", parameter.name, "': DeepSpeed gives experts groups of their own");
    }
  }
  if (step.layout.zero != 1 && step.layout.zero != 2) return {};
  CKPT_ASSIGN_OR_RETURN(const auto settings, deepspeed::EngineSettingsOf(step));
  if (!settings) {
    return Unknown(
        "the step does not have the ds_config, which would say whether "
        "round_robin_gradients "
        "changed the order of the parameters");
  }
  if (!settings->deals) return {};
  return Unknown("round_robin_gradients of the ds_config changed the order of the parameters");
}

}  // namespace ckptfs
