// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/conversion.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <initializer_list>
#include <vector>

namespace ckptfs {
namespace {

std::vector<float> RunFloats(const Conversion& conversion, const std::vector<float>& in,
                             uint64_t source_stride = 1, uint64_t destination_stride = 1) {
  const uint64_t n = in.size() / source_stride;
  std::vector<float> out(n * destination_stride, -1);
  conversion.Run(reinterpret_cast<const std::byte*>(in.data()), source_stride,
                 reinterpret_cast<std::byte*>(out.data()), destination_stride, n);
  return out;
}

Conversion Make(std::initializer_list<DType> chain, double factor = 1.0) {
  return *Conversion::Make({chain.begin(), chain.size()}, factor);
}

TEST(Conversion, EqualTypesCopyAnyBytes) {
  for (DType dtype : {DType::kBool, DType::kF8E4M3, DType::kI64, DType::kC128}) {
    const Conversion copy = Make({dtype, dtype});
    EXPECT_TRUE(copy.is_copy());
    std::vector<std::byte> in(64, std::byte{0xa5}), out(64);
    copy.Run(in.data(), 1, out.data(), 1, 64 / ByteWidth(dtype));
    EXPECT_EQ(in, out);
  }
}

// A derived bf16 weight shown as fp32 is the rounded value, not the master's.
TEST(Conversion, RoundsThroughTheTypesOnTheWay) {
  const float value = 1.0f + 1.0f / 1024;
  EXPECT_EQ(RunFloats(Make({DType::kF32, DType::kBF16, DType::kF32}), {value})[0], 1.0f);
  EXPECT_EQ(RunFloats(Make({DType::kF32, DType::kF64, DType::kF32}), {value})[0], value);
  EXPECT_TRUE(Make({DType::kF32, DType::kF64, DType::kF32}).is_copy());
  EXPECT_FALSE(Make({DType::kF32, DType::kBF16, DType::kF32}).is_copy());
}

TEST(Conversion, ScalesInFloatAndDividesByIntegers) {
  const std::vector<float> in = {1, 2, 0.1f, 7};
  const std::vector<float> thirds = RunFloats(Make({DType::kF32}, 1.0 / 3), in);
  for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(thirds[i], in[i] / 3.0f);
  const std::vector<float> tripled = RunFloats(Make({DType::kF32}, 3.0), in);
  for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(tripled[i], in[i] * 3.0f);
}

TEST(Conversion, StridesOnBothSides) {
  std::vector<float> in(5000);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  for (auto conversion : {Make({DType::kF32}), Make({DType::kF32}, 2.0)}) {
    const float factor = conversion.is_copy() ? 1 : 2;
    const std::vector<float> out = RunFloats(conversion, in, 2, 3);
    for (size_t i = 0; i < in.size() / 2; ++i) {
      ASSERT_EQ(out[3 * i], in[2 * i] * factor);
      ASSERT_EQ(out[3 * i + 1], -1);
    }
  }
}

TEST(Conversion, RefusesWhatHasNoCast) {
  const DType to_float[] = {DType::kI32, DType::kF32};
  const auto cast = Conversion::Make(to_float);
  ASSERT_FALSE(cast);
  EXPECT_EQ(cast.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(cast.error().message.find("int32"), std::string::npos);
  const DType scaled[] = {DType::kI32};
  EXPECT_FALSE(Conversion::Make(scaled, 2.0));
}

}  // namespace
}  // namespace ckptfs
