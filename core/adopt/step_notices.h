// SPDX-License-Identifier: Apache-2.0
//
// StepNotices tells what is wrong with many steps in few lines.  The steps of a run mostly share a
// reason, so each reason is told once, for its first step, with the number of the others.
//
// Thread safety: none; one caller at a time.
// Lifetime: owns its texts.

#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/adopt/closed_file.h"
#include "core/model/left_out.h"

namespace ckptfs {

class StepNotices {
 public:
  // `step`: "run7/step2".  Reasons beyond kMaxLeftOutReasons are dropped; `info` of a step has
  // them.
  void Add(const std::string& step, const std::vector<LeftOut>& left_out);
  // One reason for all steps: the first step's file stands for the others.
  void Add(const std::string& step, const std::optional<ClosedFile>& closed);

  // "run7/step2 (and 3 other steps): left out: ...", for each reason that was not told yet.
  std::vector<std::string> Take();

 private:
  struct Reason {
    std::string key;  // equal for steps that share it
    std::string text;
    std::string first;  // the step
    std::string last;
    size_t steps = 0;
    bool told = false;
  };
  void Count(const std::string& step, std::string key, std::string text);

  std::vector<Reason> reasons_;  // in the order in which they came up
};

}  // namespace ckptfs
