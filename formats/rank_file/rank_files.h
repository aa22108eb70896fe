// SPDX-License-Identifier: Apache-2.0
//
// Rank files (core/state/rank_file.h) as a source: what the ranks of a training job
// handed over of one step becomes its model.  Patterns come from a family, as for any
// other checkpoint without rules of its own.
//
// Thread safety: stateless.
// Inputs are hostile: every refusal names the file and the rule.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/io/root.h"
#include "core/state/source.h"

namespace ckptfs {

// The step of `paths`, the files of ranks 0, 1, ... of its world.  kInvalid if they are
// not such files, or of different steps, or hold a state twice or not at all.
// BLOCKS: on reading headers and pickles.
Result<StepModel> ReadRankFiles(const std::shared_ptr<const Root>& root,
                                const std::vector<std::string>& paths,
                                const SourceOptions& options);

}  // namespace ckptfs
