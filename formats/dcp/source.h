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
#include <vector>

#include "core/state/source.h"
#include "formats/dcp/form.h"

namespace ckptfs {

// `forms`: of other libraries, of which the first that fits reads a step.
std::unique_ptr<Source> MakeDcpSource(std::vector<dcp::Form> forms = {});

}  // namespace ckptfs
