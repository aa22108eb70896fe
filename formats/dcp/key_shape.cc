// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/key_shape.h"

#include "core/base/strings.h"
#include "formats/optimizer/member_order.h"

namespace ckptfs::dcp {
namespace {

// As torch.optim.Optimizer.state_dict() counts: through the groups.
Result<KeyShape> NumberedKeys(const StepModel& step) {
  KeyShape keys;
  if (step.facts.keys) {
    keys.numbers = step.facts.keys->numbers;
    if (!keys.numbers.empty()) return keys;
    if (step.facts.keys->flat) {
      return Fail(ErrorCode::kUnsupported,
                  "the optimizer was saved flat, by parameter, which does not say in which order "
                  "it had these");
    }
  }
  CKPT_RETURN_IF_ERROR(CheckMemberOrder(step));
  for (const Group& group : step.groups) {
    auto& numbers = keys.numbers[group.optimizer];
    for (const ParameterIndex p : group.parameters) {
      numbers.try_emplace(step.parameter(p).name, numbers.size());
    }
  }
  return keys;
}

Result<KeyShape> KeysAsked(const StepModel& step, ckptfs::StateKeys asked) {
  switch (asked) {
    case ckptfs::StateKeys::kAsSource: return step.facts.keys.value_or(KeyShape());
    case ckptfs::StateKeys::kNested: break;
    case ckptfs::StateKeys::kFlat: return KeyShape{.flat = true};
    case ckptfs::StateKeys::kTitan:
      return KeyShape{.model = "", .optimizer = "optimizer", .flat = true};
    case ckptfs::StateKeys::kAccelerate: return KeyShape{.optimizer = "optimizer"};
    case ckptfs::StateKeys::kNumbered: return NumberedKeys(step);
  }
  return KeyShape();
}

// Numbers are of the source's own parameters; names that a dialect made have none.
Status CheckNumbers(const StepModel& step, const KeyShape& keys) {
  for (const Group& group : step.groups) {
    if (!keys.numbers.contains(group.optimizer)) continue;
    for (const ParameterIndex p : group.parameters) {
      const std::string& name = step.parameter(p).name;
      if (keys.NumberOf(group.optimizer, name)) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        "the source's optimizer numbers its parameters, and this one has no number"}
                      .OfParameter(name)
                      .Needing("add 'nested' or 'flat' to the layout"));
    }
  }
  return {};
}

}  // namespace

Result<KeyShape> KeysFor(const StepModel& step, ckptfs::StateKeys asked) {
  CKPT_ASSIGN_OR_RETURN(KeyShape keys, KeysAsked(step, asked));
  CKPT_RETURN_IF_ERROR(CheckNumbers(step, keys));
  // Its live parameters' names.
  if (step.facts.keys && keys.state_names.empty()) keys.state_names = step.facts.keys->state_names;
  return keys;
}

}  // namespace ckptfs::dcp
