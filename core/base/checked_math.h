// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic on untrusted sizes: every function reports overflow instead of
// wrapping.  `what` names the quantity in the error.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

Result<uint64_t> CheckedAdd(uint64_t a, uint64_t b, std::string_view what);
Result<uint64_t> CheckedMul(uint64_t a, uint64_t b, std::string_view what);

// True if [offset, offset + length) lies inside [0, size), without overflow.
constexpr bool RangeInside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

// REQUIRES: divisor > 0.
constexpr uint64_t CeilDiv(uint64_t a, uint64_t divisor) {
  return a / divisor + (a % divisor != 0);
}

// REQUIRES: alignment is a power of two and the result fits.
constexpr uint64_t AlignUp(uint64_t a, uint64_t alignment) {
  return (a + alignment - 1) & ~(alignment - 1);
}

}  // namespace ckptfs
