// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of torch.distributed.checkpoint as a Source: a directory with `.metadata`
// (FSDP, DDP, tensor parallelism, torchtitan's step-N), one that holds the two of
// accelerate, or directories of them.  A directory without `.metadata` that has data files
// is a save that did not finish.
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeDcpSource();

}  // namespace ckptfs
