// SPDX-License-Identifier: Apache-2.0
//
// The words by which one kind of a step's notes is told from the others.

#pragma once

#include <string_view>

namespace ckptfs {

// How a note of a file begins that lies beside the step, that nothing is read of and that source/
// does not have.  As such files, it is not part of what the step is.
inline constexpr std::string_view kNotShownNote = "not in source/: ";

}  // namespace ckptfs
