// SPDX-License-Identifier: Apache-2.0
//
// LegacyFiles are the files of a step that Megatron saves with --ckpt-format torch, as of core
// 0.16:
//
//   <save>/latest_checkpointed_iteration.txt   "7", or "release"; written last
//   <save>/iter_0000007/                        or release/
//     mp_rank_00[_000][_000]/                   a rank that holds a part of the model
//       distrib_optim.pt                        with a distributed optimizer; written first
//       model_optim_rng.pt
//
// Which ranks there are is what the arguments in a rank's file say (rank_places.h); the names of
// the folders are compared with that.
//
// Thread safety: pure but for listing and reading.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "formats/megatron/legacy/rank_places.h"
#include "formats/tools/step_tree.h"

namespace ckptfs::megatron {

// True if a rank's folder among the entries of the directory holds a file that Megatron writes.
// BLOCKS: on listing the folders, until one does.
Result<bool> HasRankFiles(const Root& root, const std::string& directory,
                          const StepEntries& entries);

struct LegacyFiles {
  JobDegrees job;
  std::vector<RankPlace> places;  // of the ranks that wrote files
  bool flat = false;              // each has a distrib_optim.pt
};

// kInvalid names the first file that is missing, or that the arguments do not know; kUnsupported a
// job that is not understood.  `weights_only`: files of the optimizer may be gone.
// BLOCKS: on listing, on reading a header.
Result<LegacyFiles> ReadLegacyFiles(const Root& root, const std::string& directory,
                                    bool weights_only);

}  // namespace ckptfs::megatron
