// SPDX-License-Identifier: Apache-2.0
//
// RecogniseUnread names what no source has a step of, by the names of directories and files
// alone: whoever points at one is told what it is and what to do, rather than that nothing was
// found.  Checkpoints that nobody reads:
//
//   metadata.json, common.pt               Megatron's dist_checkpointing, if that is not torch_dist
//   mp_rank_00/model_optim_rng.pt, ...     Megatron's older form
//   weights/, context/; *.nemo             NeMo
//
// and steps that a save has begun, or left behind when it died:
//
//   checkpoint-500/ with a config.json     no weights yet
//
// Thread safety: pure but for listing directories.

#pragma once

#include <optional>
#include <string>

#include "core/adopt/scan.h"
#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs {

// A Recognise.  REQUIRES: no source has a step of the path.
// BLOCKS: on listing a directory and those in it that matter.
Result<std::optional<Recognised>> RecogniseUnread(const Root& root, const std::string& path);

// Returns RecogniseUnread, and the names that tools give.
ToolHints HintsOfTools();

}  // namespace ckptfs
