// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/small_float.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/result.h"
#include "core/tensor/cast.h"

namespace ckptfs {
namespace {

using Table = std::array<float, 256>;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Format {
  int mantissa_bits;
  int bias;
  bool fnuz;  // 0x80 is the only NaN
  bool ieee;  // the greatest exponent is infinity and NaN, else only all ones is NaN
};

float ValueOf(uint8_t bits, const Format& format) {
  if (format.fnuz && bits == 0x80) return kNan;
  const int mantissa_count = 1 << format.mantissa_bits;
  const int exponent = (bits & 0x7f) >> format.mantissa_bits;
  const int mantissa = bits & (mantissa_count - 1);
  const float sign = (bits & 0x80) != 0 ? -1.0f : 1.0f;
  const int greatest = 0x7f >> format.mantissa_bits;
  if (format.ieee && exponent == greatest) {
    return mantissa != 0 ? kNan : sign * std::numeric_limits<float>::infinity();
  }
  if (!format.fnuz && !format.ieee && (bits & 0x7f) == 0x7f) return kNan;
  const int significand = exponent == 0 ? mantissa : mantissa + mantissa_count;
  const int power = (exponent == 0 ? 1 : exponent) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(significand), power);
}

Table TableOf(const Format& format) {
  Table table;
  for (int i = 0; i < 256; ++i) table[i] = ValueOf(static_cast<uint8_t>(i), format);
  return table;
}

template <class F>
Table Filled(F&& value) {
  Table table;
  for (int i = 0; i < 256; ++i) table[i] = value(i);
  return table;
}

}  // namespace

const Table* SmallFloatValues(DType dtype) {
  static const Table e4m3 = TableOf({3, 7, false, false});
  static const Table e5m2 = TableOf({2, 15, false, true});
  static const Table e4m3_fnuz = TableOf({3, 8, true, false});
  static const Table e5m2_fnuz = TableOf({2, 16, true, false});
  static const Table e8m0 =
      Filled([](int i) { return i == 255 ? kNan : std::ldexp(1.0f, i - 127); });
  static const Table i8 = Filled([](int i) { return static_cast<float>(static_cast<int8_t>(i)); });
  static const Table u8 = Filled([](int i) { return static_cast<float>(i); });
  switch (dtype) {
    case DType::kF8E4M3: return &e4m3;
    case DType::kF8E5M2: return &e5m2;
    case DType::kF8E4M3Fnuz: return &e4m3_fnuz;
    case DType::kF8E5M2Fnuz: return &e5m2_fnuz;
    case DType::kF8E8M0: return &e8m0;
    case DType::kI8: return &i8;
    case DType::kU8: return &u8;
    default: return nullptr;
  }
}

void DecodeToFloat(DType dtype, const std::byte* source, float* destination, size_t elements) {
  if (dtype == DType::kF32) {
    std::memcpy(destination, source, elements * sizeof(float));
  } else if (const Table* table = SmallFloatValues(dtype)) {
    for (size_t i = 0; i < elements; ++i) {
      destination[i] = (*table)[static_cast<uint8_t>(source[i])];
    }
  } else {
    CKPT_CHECK(IsFloat(dtype));
    FindCast(dtype, DType::kF32)(source, reinterpret_cast<std::byte*>(destination), elements);
  }
}

}  // namespace ckptfs
