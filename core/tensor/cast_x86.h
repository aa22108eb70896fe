// SPDX-License-Identifier: Apache-2.0
//
// Kernels of cast.h for x86 instruction sets.  They return how many leading
// elements they converted; cast.cc finishes the rest with the scalar kernel.
//
// Thread safety: pure functions.  REQUIRES: the processor has the set.
// Units: elements.

#pragma once

#include <cstddef>

#include "core/tensor/cast.h"

namespace ckptfs::internal {

using BlockCast = size_t (*)(const std::byte* source, std::byte* destination, size_t elements);

// nullptr when the level has no kernel for the pair.
BlockCast FindX86Cast(DType from, DType to, CastLevel level);

}  // namespace ckptfs::internal
