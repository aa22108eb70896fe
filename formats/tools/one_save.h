// SPDX-License-Identifier: Apache-2.0
//
// A tool that saves into the directory of an earlier save replaces the files that it writes, and
// leaves those that it does not.  CheckOneSave tells by what lies there, not by times, which
// programs that copy may change.
//
// Thread safety: pure but for reading a file.

#pragma once

#include <string>

#include "core/base/result.h"
#include "core/io/root.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {

// kInvalid if a tool's directory holds files that no single save writes: sharded states and an
// optimizer's whole file; or states beside a training_args.bin by which Trainer saves none.
// BLOCKS: on reading that.
Status CheckOneSave(const Root& root, const std::string& directory, StepTool tool,
                    const StepEntries& entries);

}  // namespace ckptfs
