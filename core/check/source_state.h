// SPDX-License-Identifier: Apache-2.0
//
// SourceState says, for lists, whether the files of a step are still as they were adopted.
//
// Thread safety: may be called concurrently.

#pragma once

#include <string>
#include <string_view>

#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"

namespace ckptfs {

enum class SourceState {
  kSound,    // unchanged since it was adopted
  kTouched,  // a file was touched: its first reader compares its bytes
  kStale,    // a file changed
  kMissing,  // a file is gone, or cannot be looked at
};

struct SourceReport {
  SourceState state = SourceState::kSound;
  std::string reason;  // of the first such file, one that is worse before one that was touched;
                       // empty if it is sound
};

// "sound", "touched", "stale", "missing".
std::string_view SourceStateName(SourceState state);

// Looks at every file that something of the step is read from.  BLOCKS: on stat, on
// reading samples.
SourceReport LookAtSources(const StepModel& model, BlobReader& blobs);

}  // namespace ckptfs
