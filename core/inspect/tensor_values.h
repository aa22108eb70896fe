// SPDX-License-Identifier: Apache-2.0
//
// Elements of any dtype as numbers, exactly: the 8-bit floats by their tables (OCP's, and the
// "fnuz" ones), others by what they are.
//
// Thread safety: pure functions.
// Units: elements.

#pragma once

#include <cstddef>
#include <span>

#include "core/tensor/dtype.h"

namespace ckptfs {

// Every value of every dtype that has numbers: 64 bits of mantissa.
using WideNumber = long double;
static_assert(__LDBL_MANT_DIG__ >= 64);

// False of complex types and of those that are packed into less than a byte.
bool HasNumbers(DType dtype);

// REQUIRES: HasNumbers(dtype); bytes.size() == numbers.size() * ByteWidth(dtype).
void DecodeNumbers(DType dtype, std::span<const std::byte> bytes, std::span<double> numbers);
// The same where a double does not hold all values (64-bit integers).
void DecodeNumbers(DType dtype, std::span<const std::byte> bytes, std::span<WideNumber> numbers);
// True of those.
bool NeedsWide(DType dtype);

}  // namespace ckptfs
