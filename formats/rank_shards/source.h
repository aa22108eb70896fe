// SPDX-License-Identifier: Apache-2.0
//
// Files that the ranks of an FSDP job write each for itself as a Source (step_files.h): verl's and
// SkyRL's global_step_N, or a directory that holds the files of one model.  Of several models in a
// step (actor, critic) the step is the first; the others are named, and are steps by themselves
// where their own folders are given.
//
// Thread safety: stateless.

#pragma once

#include <memory>

#include "core/state/source.h"

namespace ckptfs {

std::unique_ptr<Source> MakeRankShardsSource();

}  // namespace ckptfs
