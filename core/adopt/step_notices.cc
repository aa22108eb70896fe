// SPDX-License-Identifier: Apache-2.0

#include "core/adopt/step_notices.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {

void StepNotices::Count(const std::string& step, std::string key, std::string text) {
  auto known = std::ranges::find(reasons_, key, &Reason::key);
  if (known == reasons_.end()) {
    if (reasons_.size() >= kMaxLeftOutReasons) return;
    known = reasons_.insert(known, {std::move(key), std::move(text), step, "", 0, false});
  }
  known->steps += known->last != step;  // two parts of one step may have one reason
  known->last = step;
}

void StepNotices::Add(const std::string& step, const std::vector<LeftOut>& left_out) {
  for (const LeftOut& one : left_out) {
    const std::string part = std::to_string(static_cast<int>(one.part));
    Count(step, StrCat(part, "\n", one.why, "\n", one.remedy), LeftOutText(one));
  }
}

void StepNotices::Add(const std::string& step, const std::optional<ClosedFile>& closed) {
  if (!closed) return;
  Count(step, "closed", StrCat("other users do not see it: ", DescribeClosedFile(*closed)));
}

std::vector<std::string> StepNotices::Take() {
  std::vector<std::string> lines;
  for (Reason& reason : reasons_) {
    if (std::exchange(reason.told, true)) continue;
    const size_t more = reason.steps - 1;
    const std::string others = more == 0 ? "" : StrCat(" (and ", Counted(more, "other step"), ")");
    lines.push_back(StrCat(reason.first, others, ": ", reason.text));
  }
  return lines;
}

}  // namespace ckptfs
