// SPDX-License-Identifier: Apache-2.0
//
// Formats know which files of a step that is compacted (core/adopt/compact.h) a view shows.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "core/model/step_model.h"

namespace ckptfs {

// By blob: 1 if a view shows the file as it is.
std::vector<uint8_t> FilesShownWhole(const StepModel& step);

}  // namespace ckptfs
