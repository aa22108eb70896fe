// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/cast.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <vector>

namespace ckptfs {
namespace {

constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

template <class To, class From>
To CastOne(DType from, DType to, From value, CastLevel level = CastLevel::kScalar) {
  From in[33];
  To out[33];
  std::fill_n(in, 33, value);
  FindCast(from, to, level)(reinterpret_cast<const std::byte*>(in),
                            reinterpret_cast<std::byte*>(out), 33);
  EXPECT_EQ(out[0], out[32]);
  return out[0];
}

struct Known {
  float value;
  uint16_t bf16;
  uint16_t fp16;
};

// Worked by hand from IEEE 754: ties to even, subnormals, overflow.
TEST(Cast, RoundsAsIeee754Says) {
  const Known known[] = {
      {0.0f, 0x0000, 0x0000},           {-0.0f, 0x8000, 0x8000},    {1.0f, 0x3f80, 0x3c00},
      {1.00390625f, 0x3f80, 0x3c04},  // 1 + 2^-8: a tie, to even (down)
      {1.01171875f, 0x3f82, 0x3c0c},  // 1 + 3 * 2^-8: a tie, to even (up)
      {65504.0f, 0x4780, 0x7bff},     // greatest fp16
      {65519.0f, 0x4780, 0x7bff},       {65520.0f, 0x4780, 0x7c00},  // a tie, to infinity
      {5.9604645e-8f, 0x3380, 0x0001},                               // least fp16 subnormal, 2^-24
      {2.9802322e-8f, 0x3300, 0x0000},                               // its half: a tie, to zero
      {8.940697e-8f, 0x33c0, 0x0002},                                // 1.5 times it: a tie, to 2
      {6.0975552e-5f, 0x3880, 0x03ff},                               // greatest fp16 subnormal
      {3.4028235e38f, 0x7f80, 0x7c00},  // greatest fp32 rounds to infinity
      {1e-45f, 0x0000, 0x0000},         // least fp32 subnormal
      {1.1754942e-38f, 0x0080, 0x0000},
  };
  for (CastLevel level : {CastLevel::kScalar, CastLevel::kAvx2, CastLevel::kAvx512}) {
    if (level > BestCastLevel()) continue;
    for (const Known& k : known) {
      EXPECT_EQ(CastOne<uint16_t>(DType::kF32, DType::kBF16, k.value, level), k.bf16) << k.value;
      EXPECT_EQ(CastOne<uint16_t>(DType::kF32, DType::kF16, k.value, level), k.fp16) << k.value;
    }
  }
}

TEST(Cast, NanKeepsWhatTheHeaderPromises) {
  const float nan = std::bit_cast<float>(0xff812345u);
  EXPECT_EQ(CastOne<uint16_t>(DType::kF32, DType::kBF16, nan), 0xffff);
  EXPECT_EQ(CastOne<uint16_t>(DType::kF32, DType::kF16, nan), 0xfe09);
  EXPECT_EQ((CastOne<uint16_t, uint16_t>(DType::kF16, DType::kBF16, 0x7c01)), 0x7fc0);
  EXPECT_EQ((CastOne<uint32_t, uint16_t>(DType::kF16, DType::kF32, 0x7c01)), 0x7fc02000u);
}

// All levels give the same bits for any pattern, length and alignment.
TEST(Cast, LevelsAgree) {
  std::mt19937_64 random(7);
  for (DType from : kFloats) {
    for (DType to : kFloats) {
      if (from == to) continue;
      const size_t width = ByteWidth(to);
      for (size_t n : {0u, 1u, 7u, 8u, 15u, 16u, 17u, 100u, 5000u}) {
        std::vector<std::byte> in(n * ByteWidth(from) + 1);
        for (std::byte& byte : in) byte = static_cast<std::byte>(random());
        std::vector<std::byte> expected(n * width + 1), out(n * width + 1);
        FindCast(from, to, CastLevel::kScalar)(in.data() + 1, expected.data() + 1, n);
        for (CastLevel level : {CastLevel::kAvx2, CastLevel::kAvx512}) {
          if (level > BestCastLevel()) continue;
          FindCast(from, to, level)(in.data() + 1, out.data() + 1, n);
          EXPECT_EQ(std::memcmp(out.data() + 1, expected.data() + 1, n * width), 0)
              << DTypeName(from) << " " << DTypeName(to) << " " << n;
        }
      }
    }
  }
}

// 16 -> 32 -> 16 bits is the identity for everything but NaNs.
TEST(Cast, WideningIsExact) {
  for (DType narrow : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> in(1 << 16), back(1 << 16);
    for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(in.size());
    FindCast(narrow, DType::kF32)(reinterpret_cast<const std::byte*>(in.data()),
                                  reinterpret_cast<std::byte*>(wide.data()), in.size());
    FindCast(DType::kF32, narrow)(reinterpret_cast<const std::byte*>(wide.data()),
                                  reinterpret_cast<std::byte*>(back.data()), in.size());
    for (size_t i = 0; i < in.size(); ++i) {
      if (wide[i] == wide[i]) {
        ASSERT_EQ(in[i], back[i]);
      }
    }
  }
}

TEST(Cast, OnlyFloatsAreCast) {
  EXPECT_EQ(FindCast(DType::kF32, DType::kI32), nullptr);
  EXPECT_EQ(FindCast(DType::kF8E4M3, DType::kF32), nullptr);
  EXPECT_TRUE(CanCast(DType::kBool, DType::kBool));
  EXPECT_FALSE(CanCast(DType::kBool, DType::kU8));
  EXPECT_TRUE(IsExact(DType::kBF16, DType::kF32));
  EXPECT_FALSE(IsExact(DType::kBF16, DType::kF16));
}

}  // namespace
}  // namespace ckptfs
