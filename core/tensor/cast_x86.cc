// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/cast_x86.h"

#include <cstdint>

#if defined(__x86_64__)

// GCC 12's own AVX-512 headers trip this warning (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#define CKPT_AVX2 __attribute__((target("avx2,f16c")))
#define CKPT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))

namespace ckptfs::internal {
namespace {

// The bf16 values that NaNs become (see cast.h).
constexpr int kNanOfFloat = 0xffff;
constexpr int kNanOfHalf = 0x7fc0;
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// ---- AVX2: 8 elements at a time ----

CKPT_AVX2 inline __m128i RoundToBFloat8(__m256 values, int nan) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(nan), is_nan);
  const __m256i packed = _mm256_packus_epi32(chosen, chosen);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

CKPT_AVX2 inline __m256 WidenBFloat8(const uint16_t* source) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

CKPT_AVX2 inline __m256 WidenHalf8(const uint16_t* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}

CKPT_AVX2 inline void Store8(uint16_t* destination, __m128i values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(destination), values);
}

CKPT_AVX2 size_t FloatToBFloatAvx2(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const float*>(source);
  auto* out = reinterpret_cast<uint16_t*>(destination);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) Store8(out + i, RoundToBFloat8(_mm256_loadu_ps(in + i), kNanOfFloat));
  return i;
}
CKPT_AVX2 size_t FloatToHalfAvx2(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const float*>(source);
  auto* out = reinterpret_cast<uint16_t*>(destination);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) Store8(out + i, _mm256_cvtps_ph(_mm256_loadu_ps(in + i), kNearest));
  return i;
}
CKPT_AVX2 size_t BFloatToFloatAvx2(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const uint16_t*>(source);
  auto* out = reinterpret_cast<float*>(destination);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, WidenBFloat8(in + i));
  return i;
}
CKPT_AVX2 size_t HalfToFloatAvx2(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const uint16_t*>(source);
  auto* out = reinterpret_cast<float*>(destination);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, WidenHalf8(in + i));
  return i;
}
CKPT_AVX2 size_t BFloatToHalfAvx2(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const uint16_t*>(source);
  auto* out = reinterpret_cast<uint16_t*>(destination);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) Store8(out + i, _mm256_cvtps_ph(WidenBFloat8(in + i), kNearest));
  return i;
}
CKPT_AVX2 size_t HalfToBFloatAvx2(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const uint16_t*>(source);
  auto* out = reinterpret_cast<uint16_t*>(destination);
  size_t i = 0;
  for (; i + 8 <= n; i += 8) Store8(out + i, RoundToBFloat8(WidenHalf8(in + i), kNanOfHalf));
  return i;
}

// ---- AVX-512: 16 elements at a time ----

// Not vcvtneps2bf16: that flushes subnormals.
CKPT_AVX512 inline __m256i RoundToBFloat16(__m512 values, int nan) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(rounded, is_nan, nan));
}

CKPT_AVX512 inline __m512 WidenBFloat16(const uint16_t* source) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

CKPT_AVX512 inline __m512 WidenHalf16(const uint16_t* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

CKPT_AVX512 inline void Store16(uint16_t* destination, __m256i values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination), values);
}

CKPT_AVX512 size_t FloatToBFloatAvx512(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const float*>(source);
  auto* out = reinterpret_cast<uint16_t*>(destination);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    Store16(out + i, RoundToBFloat16(_mm512_loadu_ps(in + i), kNanOfFloat));
  }
  return i;
}
CKPT_AVX512 size_t FloatToHalfAvx512(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const float*>(source);
  auto* out = reinterpret_cast<uint16_t*>(destination);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) Store16(out + i, _mm512_cvtps_ph(_mm512_loadu_ps(in + i), kNearest));
  return i;
}
CKPT_AVX512 size_t BFloatToFloatAvx512(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const uint16_t*>(source);
  auto* out = reinterpret_cast<float*>(destination);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, WidenBFloat16(in + i));
  return i;
}
CKPT_AVX512 size_t HalfToFloatAvx512(const std::byte* source, std::byte* destination, size_t n) {
  const auto* in = reinterpret_cast<const uint16_t*>(source);
  auto* out = reinterpret_cast<float*>(destination);
  size_t i = 0;
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, WidenHalf16(in + i));
  return i;
}

struct Kernel {
  DType from;
  DType to;
  BlockCast avx2;
  BlockCast avx512;
};
constexpr Kernel kKernels[] = {
    {DType::kF32, DType::kBF16, FloatToBFloatAvx2, FloatToBFloatAvx512},
    {DType::kF32, DType::kF16, FloatToHalfAvx2, FloatToHalfAvx512},
    {DType::kBF16, DType::kF32, BFloatToFloatAvx2, BFloatToFloatAvx512},
    {DType::kF16, DType::kF32, HalfToFloatAvx2, HalfToFloatAvx512},
    {DType::kBF16, DType::kF16, BFloatToHalfAvx2, BFloatToHalfAvx2},
    {DType::kF16, DType::kBF16, HalfToBFloatAvx2, HalfToBFloatAvx2},
};

}  // namespace

BlockCast FindX86Cast(DType from, DType to, CastLevel level) {
  if (level == CastLevel::kScalar) return nullptr;
  for (const Kernel& kernel : kKernels) {
    if (kernel.from == from && kernel.to == to) {
      return level == CastLevel::kAvx512 ? kernel.avx512 : kernel.avx2;
    }
  }
  return nullptr;
}

}  // namespace ckptfs::internal

#else

namespace ckptfs::internal {
BlockCast FindX86Cast(DType, DType, CastLevel) { return nullptr; }
}  // namespace ckptfs::internal

#endif
