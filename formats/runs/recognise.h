// SPDX-License-Identifier: Apache-2.0
//
// RecogniseUnread names checkpoints that no source reads, by the names of their
// files alone: whoever points at one is told what it is and what to do, rather
// than that nothing was found.
//
//   metadata.json, common.pt               Megatron's dist_checkpointing
//   mp_rank_00/model_optim_rng.pt, ...     Megatron's older form
//   weights/, context/; *.nemo             NeMo
//
// Thread safety: pure but for listing directories.

#pragma once

#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs {

// "Megatron torch_dist: not readable yet"; nothing for what is not known.
// BLOCKS: on listing a directory and those in it that matter.
Result<std::optional<std::string>> RecogniseUnread(const Root& root, const std::string& path);

}  // namespace ckptfs
