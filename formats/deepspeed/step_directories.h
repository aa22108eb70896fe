// SPDX-License-Identifier: Apache-2.0
//
// Finds the directories that are DeepSpeed steps: the one that is asked for itself, or
// every tag of a save directory, whose pointer file names the newest.  If the pointer is a
// path ("epoch1/step5"), all folders that lie as deep are looked into: their steps are of one run
// and called "epoch1-step5".  Where a training tool wrote around a tag
// (formats/tools/step_tree.h) its directory is the step, and names it; a conversion
// in it gets "_universal" added.  If there are several tags, each is a step, named
// after both.
//
// Thread safety: pure but for reading directories.

#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"

namespace ckptfs::deepspeed {

using IsStep = std::function<Result<bool>(const Root& root, const std::string& directory)>;

// `pointer`: "latest" or "latest_universal".  One that names no directory takes
// no step away: it is a candidate of its own, which CheckPointer refuses.
Result<std::vector<StepCandidate>> FindSteps(const std::shared_ptr<const Root>& root,
                                             const std::string& directory, std::string_view pointer,
                                             const IsStep& is_step);

// kInvalid if the candidate is a pointer that names no directory.
Status CheckPointer(const StepCandidate& step);

// kInvalid if --model is given, which a step of DeepSpeed has no keys for.
Status CheckNoModelKey(const StepCandidate& step, const SourceOptions& options);

// Carries what lies around a step: all files of its own directory, and, where no tool wrote that,
// as texts the scripts of its save directory and `pointer`, which then names the step.  BLOCKS: on
// looking at them. REQUIRES: all files that something is read of were added to the assembler.
Status CarryBeside(Assembler& assembler, const StepCandidate& step, std::string_view pointer);

// True if <directory>/zero is a folder: the mark of a universal directory.
Result<bool> HasUniversalStates(const Root& root, const std::string& directory);

}  // namespace ckptfs::deepspeed
