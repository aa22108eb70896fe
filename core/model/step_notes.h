// SPDX-License-Identifier: Apache-2.0
//
// The words by which one kind of a step's notes is told from the others.

#pragma once

#include <string_view>

namespace ckptfs {

// How a note of a file begins that lies beside the step, that nothing is read of and that source/
// does not have.  As such files, it is not part of what the step is.
inline constexpr std::string_view kNotShownNote = "not in source/: ";

// How a note begins that the times of files led to: those of a copy are others, so it is not part
// of what the step is.
inline constexpr std::string_view kTimesNote = "by the times of its files: ";

}  // namespace ckptfs
