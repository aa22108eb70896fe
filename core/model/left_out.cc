// SPDX-License-Identifier: Apache-2.0

#include "core/model/left_out.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "core/model/step_model.h"

namespace ckptfs {

std::string_view LeftOutPartName(LeftOutPart part) {
  switch (part) {
    case LeftOutPart::kModel: return "model";
    case LeftOutPart::kOptimizer: return "optimizer";
    case LeftOutPart::kDocument: break;
  }
  return "document";
}

void LeaveOut(StepModel& step, LeftOut one) {
  LeftOut* last = nullptr;
  size_t reasons = 0;
  for (LeftOut& known : step.left_out) {
    if (known.part != one.part) continue;
    if (known.why == one.why && known.remedy == one.remedy && known.optimizer == one.optimizer) {
      known.more += 1 + one.more;
      return;
    }
    last = &known;
    ++reasons;
  }
  if (reasons >= kMaxLeftOutReasons) {
    last->why = kManyReasons;
    last->remedy.clear();
    last->optimizer.reset();
    last->more += 1 + one.more;
    return;
  }
  step.left_out.push_back(std::move(one));
}

const LeftOut* FindLostState(const StepModel& step, std::string_view optimizer) {
  const auto found = std::ranges::find_if(step.left_out, [&](const LeftOut& one) {
    return one.part == LeftOutPart::kOptimizer && (!one.optimizer || *one.optimizer == optimizer);
  });
  return found == step.left_out.end() ? nullptr : &*found;
}

std::string LeftOutText(const LeftOut& one) {
  return StrCat("left out: ", one.what, one.more > 0 ? StrCat(" and ", one.more, " more") : "",
                ": ", one.why, one.remedy.empty() ? "" : "; ", one.remedy);
}

}  // namespace ckptfs
