// SPDX-License-Identifier: Apache-2.0
//
// A file or directory that the store takes keeps its source's owner and mode, which decide who
// may see the step.
//
// Thread safety: may be called concurrently.

#pragma once

#include <cstdint>
#include <string>

#include "core/base/result.h"
#include "core/io/file.h"

namespace ckptfs {

// Gives the open file or directory `to`, which `name` is the path of, owner (if we are root) and
// mode of `from`, and the bits `at_least`.  An ACL is not taken: only its owner's bits remain.
Status TakeAccess(int to, const std::string& name, const OwnerAndMode& from, uint32_t at_least);

}  // namespace ckptfs
