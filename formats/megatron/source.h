// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints of megatron-core's dist_checkpointing (torch_dist) as a Source:
//
//   <save>/latest_checkpointed_iteration.txt   "7", or "release"
//   <save>/iter_0000007/                        or release/
//     metadata.json                             sharded_backend: torch_dist; written last
//     .metadata, __<rank>_<N>.distcp            torch.distributed.checkpoint's
//     common.pt                                 of cores up to 0.18
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeMegatronSource();

}  // namespace ckptfs
