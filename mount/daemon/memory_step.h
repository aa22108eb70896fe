// SPDX-License-Identifier: Apache-2.0
//
// The step that several daemons' memory holds, as a model over its rank files.
//
// Thread safety: pure functions of what they are given.

#pragma once

#include <memory>

#include "core/base/result.h"
#include "core/commit/kept_files.h"
#include "core/peer/peer_root.h"
#include "core/store/step_catalogue.h"
#include "core/store/store.h"

namespace ckptfs {

// The step of the rank files that daemons hold.  Tensors that did not change lie in files of
// earlier steps, which the store has; `say` is told of their directories (KeptFiles::Hold).
// BLOCKS: on the network, and on the store.
Result<MemoryStep> StepOfMemory(const std::shared_ptr<PeerRoot>& root, Store& store,
                                const KeptFiles::Say& say);

}  // namespace ckptfs
