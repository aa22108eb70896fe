// SPDX-License-Identifier: Apache-2.0

#include "core/base/checked_math.h"

#include "core/base/strings.h"

namespace ckptfs {

Result<uint64_t> CheckedAdd(uint64_t a, uint64_t b, std::string_view what) {
  uint64_t sum;
  if (__builtin_add_overflow(a, b, &sum)) {
    return Fail(ErrorCode::kInvalid, StrCat(what, " overflows: ", a, " + ", b));
  }
  return sum;
}

Result<uint64_t> CheckedMul(uint64_t a, uint64_t b, std::string_view what) {
  uint64_t product;
  if (__builtin_mul_overflow(a, b, &product)) {
    return Fail(ErrorCode::kInvalid, StrCat(what, " overflows: ", a, " * ", b));
  }
  return product;
}

}  // namespace ckptfs
