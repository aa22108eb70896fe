// SPDX-License-Identifier: Apache-2.0
//
// MakeComparable lets digests of masters and weights be compared: casts differ in the bits of NaN,
// and devices in values that are not normal.
//
// Thread safety: a pure function over what it is given.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <span>

namespace ckptfs {

// `floats`: fp32 values in this machine's order.  All NaNs become alike, and values below the least
// normal one 0.
inline void MakeComparable(std::span<std::byte> floats) {
  for (size_t at = 0; at + sizeof(float) <= floats.size(); at += sizeof(float)) {
    float value;
    std::memcpy(&value, floats.data() + at, sizeof(value));
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
    if (std::fabs(value) < std::numeric_limits<float>::min()) value = 0;
    std::memcpy(floats.data() + at, &value, sizeof(value));
  }
}

}  // namespace ckptfs
