// SPDX-License-Identifier: Apache-2.0
//
// Names that are components of paths: those of runs and steps.
//
// Thread safety: may be called concurrently.

#pragma once

#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

// Not empty, not "." or "..", no '/', no control characters, at most 200 bytes; kInvalid
// says which.  `what`: whose name it is.
Status CheckName(std::string_view name, std::string_view what);

}  // namespace ckptfs
