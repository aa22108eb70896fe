// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/shape.h"

#include <algorithm>

#include "core/base/checked_math.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {
constexpr uint64_t kMaxElements = uint64_t{1} << 63;
}

Result<uint64_t> ElementCount(const Shape& shape) {
  if (shape.size() > kMaxDimensions) {
    return Fail(ErrorCode::kInvalid, StrCat("a tensor of ", shape.size(), " dimensions; at most ",
                                            kMaxDimensions, " are allowed"));
  }
  uint64_t product = 1;
  bool empty = false;
  for (uint64_t dim : shape) {
    if (dim == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, dim, &product) || product > kMaxElements) {
      return Fail(ErrorCode::kInvalid,
                  StrCat("shape ", ShapeToString(shape), " has more than 2^63 elements"));
    }
  }
  return empty ? 0 : product;
}

Result<uint64_t> ByteCount(const Shape& shape, DType dtype) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(shape));
  CKPT_ASSIGN_OR_RETURN(
      const uint64_t bits,
      CheckedMul(elements, BitWidth(dtype) % 8 == 0 ? ByteWidth(dtype) : BitWidth(dtype),
                 "bytes of a tensor"));
  return ByteWidth(dtype) != 0 ? bits : CeilDiv(bits, 8);
}

std::vector<uint64_t> RowMajorStrides(const Shape& shape) {
  std::vector<uint64_t> strides(shape.size());
  uint64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<uint64_t>(shape[d], 1);
  }
  return strides;
}

std::string ShapeToString(const Shape& shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(shape[d]);
  }
  return text + "]";
}

}  // namespace ckptfs
