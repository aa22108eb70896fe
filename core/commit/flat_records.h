// SPDX-License-Identifier: Apache-2.0
//
// Records of steps of several daemons as builds before one folder per attempt named them
// (ParseFlatName).  What such daemons left whole becomes a step all the same: their records
// get the names of today.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <functional>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs {

// Moves the records of attempts all of whose daemons are gone, and removes these daemons' ranks.
Status MoveFlatRecords(Storage& storage,
                       const std::function<Result<bool>(const Digest& node)>& has_gone);

}  // namespace ckptfs
