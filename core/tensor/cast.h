// SPDX-License-Identifier: Apache-2.0
//
// Casts between the floating types: round to nearest even, subnormals kept,
// every result bit-equal to torch 2.13's on an AVX2 machine.  This fixes the
// NaNs too, on which torch's own code paths differ: fp32 and fp64 to bf16 give
// 0xffff, fp16 to bf16 gives 0x7fc0, and all others keep sign and leading
// payload bits and set the quiet bit (what F16C does).
//
// Thread safety: pure functions; pointers need no alignment; source and
// destination must not overlap.
// Units: elements.

#pragma once

#include <cstddef>

#include "core/tensor/dtype.h"

namespace ckptfs {

// Instruction sets with kernels of their own; all give the same bits.
enum class CastLevel { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

// The best level this processor has.
CastLevel BestCastLevel();

using CastFunction = void (*)(const std::byte* source, std::byte* destination, size_t elements);

// The kernel for two different floating types; nullptr for any other pair.
CastFunction FindCast(DType from, DType to, CastLevel level = BestCastLevel());

// True if values of one type can be shown as the other: equal types, or both
// floating.
inline bool CanCast(DType from, DType to) { return from == to || (IsFloat(from) && IsFloat(to)); }

// True if every value of `from` is a value of `to`.
bool IsExact(DType from, DType to);

}  // namespace ckptfs
