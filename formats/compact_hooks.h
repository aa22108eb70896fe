// SPDX-License-Identifier: Apache-2.0
//
// What formats know of a step that is compacted (core/adopt/compact.h): which of its files views
// show as they are, and which documents name files by number or path.
//
// Thread safety: pure functions.

#pragma once

#include "core/adopt/compact_plan.h"

namespace ckptfs {

CompactHooks MakeCompactHooks();

}  // namespace ckptfs
