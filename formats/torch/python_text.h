// SPDX-License-Identifier: Apache-2.0
//
// str() of a Python value, as torch's planner makes keys of the keys of a dict.
//
// Thread safety: pure.

#pragma once

#include <optional>
#include <string>

#include "formats/torch/pickle_value.h"

namespace ckptfs {

// The text of a text, a number, a truth value, None or a tuple of these ("('web', 1)"); nothing
// for other values, and for texts in tuples whose repr() takes escapes.
std::optional<std::string> PythonText(PickleRef value);

}  // namespace ckptfs
