// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints that ranks of Megatron write each for itself (--ckpt-format torch; step_files.h) as
// a Source.
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeMegatronLegacySource();

}  // namespace ckptfs
