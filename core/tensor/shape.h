// SPDX-License-Identifier: Apache-2.0
//
// Shape lists the dimensions of a tensor, outermost first; row-major is the
// only order of elements.  A rank-0 shape has one element.
//
// Thread safety: value type; the functions are pure.
// Units: elements, never bytes.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/dtype.h"

namespace ckptfs {

using Shape = std::vector<uint64_t>;

// Refused above this many dimensions (torch's own limit is 64).
inline constexpr size_t kMaxDimensions = 64;

// Product of the dimensions; kInvalid when it, or any partial product of the
// non-zero dimensions, overflows 2^63.
Result<uint64_t> ElementCount(const Shape& shape);

// Bytes of a dense tensor; sub-byte types are rounded up to a whole byte.
Result<uint64_t> ByteCount(const Shape& shape, DType dtype);

// Row-major strides in elements.  REQUIRES: ElementCount(shape) succeeds.
std::vector<uint64_t> RowMajorStrides(const Shape& shape);

std::string ShapeToString(const Shape& shape);  // "[2, 3]"

}  // namespace ckptfs
