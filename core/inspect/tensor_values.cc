// SPDX-License-Identifier: Apache-2.0

#include "core/inspect/tensor_values.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "core/tensor/cast.h"

namespace ckptfs {
namespace {

using Table = std::array<double, 256>;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Sign, exponent and mantissa as in IEEE, but for what `special` says of the last codes.
enum class Special { kIeee, kFn, kFnuz };
Table SmallFloats(int mantissa_bits, int bias, Special special) {
  Table table{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code & 0x7f) >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const int greatest = 0x7f >> mantissa_bits;
    const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
    const double scale = std::ldexp(1.0, -mantissa_bits);
    double value = exponent == 0 ? std::ldexp(mantissa * scale, 1 - bias)
                                 : std::ldexp(1.0 + mantissa * scale, exponent - bias);
    if (special == Special::kIeee && exponent == greatest) {
      value = mantissa == 0 ? std::numeric_limits<double>::infinity() : kNaN;
    }
    if (special == Special::kFn && (code & 0x7f) == 0x7f) value = kNaN;
    if (special == Special::kFnuz && code == 0x80) value = kNaN;
    table[static_cast<size_t>(code)] = sign * value;
  }
  return table;
}

Table Powers() {  // E8M0
  Table table{};
  for (int code = 0; code < 255; ++code)
    table[static_cast<size_t>(code)] = std::ldexp(1.0, code - 127);
  table[255] = kNaN;
  return table;
}

const Table* TableOf(DType dtype) {
  static const Table e4m3 = SmallFloats(3, 7, Special::kFn);
  static const Table e5m2 = SmallFloats(2, 15, Special::kIeee);
  static const Table e4m3fnuz = SmallFloats(3, 8, Special::kFnuz);
  static const Table e5m2fnuz = SmallFloats(2, 16, Special::kFnuz);
  static const Table e8m0 = Powers();
  switch (dtype) {
    case DType::kF8E4M3: return &e4m3;
    case DType::kF8E5M2: return &e5m2;
    case DType::kF8E4M3Fnuz: return &e4m3fnuz;
    case DType::kF8E5M2Fnuz: return &e5m2fnuz;
    case DType::kF8E8M0: return &e8m0;
    default: return nullptr;
  }
}

template <class T, class V>
void Load(std::span<const std::byte> bytes, std::span<V> numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    numbers[i] = static_cast<V>(value);
  }
}

template <class V>
void LoadSmall(const Table& table, std::span<const std::byte> bytes, std::span<V> numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<V>(table[static_cast<size_t>(bytes[i])]);
  }
}

template <class V>
void LoadHalf(DType dtype, std::span<const std::byte> bytes, std::span<V> numbers) {
  std::vector<float> wide(numbers.size());
  FindCast(dtype, DType::kF32)(bytes.data(), reinterpret_cast<std::byte*>(wide.data()),
                               wide.size());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<V>(wide[i]);
}

template <class V>
void Decode(DType dtype, std::span<const std::byte> bytes, std::span<V> numbers) {
  if (const Table* table = TableOf(dtype)) return LoadSmall(*table, bytes, numbers);
  switch (dtype) {
    case DType::kF64: return Load<double>(bytes, numbers);
    case DType::kF32: return Load<float>(bytes, numbers);
    case DType::kF16:
    case DType::kBF16: return LoadHalf(dtype, bytes, numbers);
    case DType::kI64: return Load<int64_t>(bytes, numbers);
    case DType::kI32: return Load<int32_t>(bytes, numbers);
    case DType::kI16: return Load<int16_t>(bytes, numbers);
    case DType::kI8: return Load<int8_t>(bytes, numbers);
    case DType::kU64: return Load<uint64_t>(bytes, numbers);
    case DType::kU32: return Load<uint32_t>(bytes, numbers);
    case DType::kU16: return Load<uint16_t>(bytes, numbers);
    case DType::kU8: return Load<uint8_t>(bytes, numbers);
    case DType::kBool: {
      for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = bytes[i] == std::byte{0} ? 0 : 1;
      return;
    }
    default: return;
  }
}

}  // namespace

bool HasNumbers(DType dtype) {
  switch (dtype) {
    case DType::kC64:
    case DType::kC128: return false;
    default: return ByteWidth(dtype) != 0;
  }
}

bool NeedsWide(DType dtype) { return dtype == DType::kI64 || dtype == DType::kU64; }

void DecodeNumbers(DType dtype, std::span<const std::byte> bytes, std::span<double> numbers) {
  Decode(dtype, bytes, numbers);
}

void DecodeNumbers(DType dtype, std::span<const std::byte> bytes, std::span<WideNumber> numbers) {
  Decode(dtype, bytes, numbers);
}

}  // namespace ckptfs
