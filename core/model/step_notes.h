// SPDX-License-Identifier: Apache-2.0
//
// Of what a step's notes say, the part that nobody may overlook: that an optimizer lies there
// and is not taken.  A training that goes on from such a step begins without its moments.  And
// the part that nobody misses.
//
// Thread safety: pure functions.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/model/step_model.h"

namespace ckptfs {

// In each such note, whoever writes it.
inline constexpr std::string_view kWeightsOnly = "weights only";

// How a note of a file begins that lies beside the step, that nothing is read of and that source/
// does not have.  As such files, it is not part of what the step is.
inline constexpr std::string_view kNotShownNote = "not in source/: ";

inline std::vector<std::string> WeightsOnlyNotes(const StepModel& step) {
  std::vector<std::string> notes;
  for (const std::string& note : step.notes) {
    if (note.find(kWeightsOnly) != std::string::npos) notes.push_back(note);
  }
  return notes;
}

}  // namespace ckptfs
