// SPDX-License-Identifier: Apache-2.0
//
// How much memory the control groups of this process allow: the least limit of
// its own group and all above it, in the unified hierarchy (memory.max) or in
// that of the memory controller of version 1 (memory.limit_in_bytes).
//
// Thread safety: pure functions over /proc and the mounted hierarchies.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>

namespace ckptfs {

// UINT64_MAX if there is none.  All paths are looked up below `root` (tests).
uint64_t GroupMemoryLimit(const std::string& root = "");

}  // namespace ckptfs
