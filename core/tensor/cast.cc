// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/cast.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/tensor/cast_x86.h"

namespace ckptfs {
namespace {

template <class T>
T Load(const std::byte* source, size_t i) {
  T value;
  std::memcpy(&value, source + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void Store(std::byte* destination, size_t i, T value) {
  std::memcpy(destination + i * sizeof(T), &value, sizeof(T));
}

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

float ToFloat(float value) { return value; }
float ToFloat(double value) { return static_cast<float>(value); }
float ToFloat(BFloat value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
float ToFloat(Half value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1f;
  const uint32_t mantissa = value.bits & 0x3ff;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000 : 0;
    return std::bit_cast<float>(sign | 0x7f800000 | quiet | (mantissa << 13));
  }
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// `nan`: what every NaN becomes.
BFloat ToBFloat(float value, uint16_t nan) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {nan};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

Half ToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {
    return {static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff))};
  }
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // >= 65520
  if (magnitude < 0x38800000) {  // subnormal in fp16: let fp32 addition round
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000))};
  }
  const uint32_t rebased = magnitude - (112u << 23);
  return {static_cast<uint16_t>(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13))};
}

template <class From, class To>
To Convert(From value) {
  if constexpr (std::is_same_v<To, BFloat>) {
    return ToBFloat(ToFloat(value), std::is_same_v<From, Half> ? 0x7fc0 : 0xffff);
  } else if constexpr (std::is_same_v<To, Half>) {
    return ToHalf(ToFloat(value));
  } else {
    return static_cast<To>(ToFloat(value));
  }
}

template <class From, class To>
void ScalarCast(const std::byte* source, std::byte* destination, size_t elements) {
  for (size_t i = 0; i < elements; ++i) {
    Store(destination, i, Convert<From, To>(Load<From>(source, i)));
  }
}

template <class From>
CastFunction ScalarFrom(DType to) {
  switch (to) {
    case DType::kF64: return ScalarCast<From, double>;
    case DType::kF32: return ScalarCast<From, float>;
    case DType::kF16: return ScalarCast<From, Half>;
    default: return ScalarCast<From, BFloat>;
  }
}

CastFunction FindScalar(DType from, DType to) {
  switch (from) {
    case DType::kF64: return ScalarFrom<double>(to);
    case DType::kF32: return ScalarFrom<float>(to);
    case DType::kF16: return ScalarFrom<Half>(to);
    default: return ScalarFrom<BFloat>(to);
  }
}

// One entry of the table below as a function of its own, so that a caller
// holds one plain pointer: the level's blocks, then the scalar rest.
template <DType from, DType to, CastLevel level>
void LevelCast(const std::byte* source, std::byte* destination, size_t elements) {
  static const internal::BlockCast blocks = internal::FindX86Cast(from, to, level);
  static const CastFunction scalar = FindScalar(from, to);
  const size_t done = blocks(source, destination, elements);
  if (done == elements) return;
  scalar(source + done * ByteWidth(from), destination + done * ByteWidth(to), elements - done);
}

template <DType from, DType to>
CastFunction AtLevel(CastLevel level) {
  if (internal::FindX86Cast(from, to, level) == nullptr) return FindScalar(from, to);
  return level == CastLevel::kAvx512 ? LevelCast<from, to, CastLevel::kAvx512>
                                     : LevelCast<from, to, CastLevel::kAvx2>;
}

template <DType from>
CastFunction FromAtLevel(DType to, CastLevel level) {
  switch (to) {
    case DType::kF64: return AtLevel<from, DType::kF64>(level);
    case DType::kF32: return AtLevel<from, DType::kF32>(level);
    case DType::kF16: return AtLevel<from, DType::kF16>(level);
    default: return AtLevel<from, DType::kBF16>(level);
  }
}

}  // namespace

CastLevel BestCastLevel() {
#if defined(__x86_64__)
  static const CastLevel best = [] {
    __builtin_cpu_init();
    // clang 14 knows no "f16c" here; the bit is in the same leaf for both compilers.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    const bool avx2 = __builtin_cpu_supports("avx2") && f16c;
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return avx512 ? CastLevel::kAvx512 : avx2 ? CastLevel::kAvx2 : CastLevel::kScalar;
  }();
  return best;
#else
  return CastLevel::kScalar;
#endif
}

CastFunction FindCast(DType from, DType to, CastLevel level) {
  if (from == to || !IsFloat(from) || !IsFloat(to)) return nullptr;
  switch (from) {
    case DType::kF64: return FromAtLevel<DType::kF64>(to, level);
    case DType::kF32: return FromAtLevel<DType::kF32>(to, level);
    case DType::kF16: return FromAtLevel<DType::kF16>(to, level);
    default: return FromAtLevel<DType::kBF16>(to, level);
  }
}

bool IsExact(DType from, DType to) {
  if (from == to) return true;
  if (!IsFloat(from) || !IsFloat(to)) return false;
  return to == DType::kF64 || (to == DType::kF32 && from != DType::kF64);
}

}  // namespace ckptfs
