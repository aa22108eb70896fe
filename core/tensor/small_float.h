// SPDX-License-Identifier: Apache-2.0
//
// Values of the 8-bit types in which quantised weights and their scales are
// stored, as fp32 (OCP 8-bit floating point specification, revision 1.0, for
// e4m3 and e5m2; the fnuz variants have a bias greater by one, no infinities
// and no negative zero; e8m0 is a power of two).
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/tensor/dtype.h"

namespace ckptfs {

// The value of each of the 256 patterns; nullptr for a type that is not 8 bits
// of a number (fp8 variants, e8m0, int8, uint8).
const std::array<float, 256>* SmallFloatValues(DType dtype);

// True if elements of the type can be decoded to fp32.
inline bool CanDecode(DType dtype) { return IsFloat(dtype) || SmallFloatValues(dtype) != nullptr; }

// REQUIRES: CanDecode(dtype).
void DecodeToFloat(DType dtype, const std::byte* source, float* destination, size_t elements);

}  // namespace ckptfs
