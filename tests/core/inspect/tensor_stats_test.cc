// SPDX-License-Identifier: Apache-2.0
//
// Statistics and differences of runs of elements; of whole steps they are compared with numpy and
// torch in tests/e2e/test_inspection.py.

#include "core/inspect/tensor_stats.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/inspect/tensor_diff.h"

namespace ckptfs {
namespace {

template <class T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span<const T>(values));
}

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(TensorStats, CountsWhatIsNoNumber) {
  const std::vector<float> values = {1, -3, 0, -0.0F, kNaN, kInf, -kInf, 2};
  const TensorStats stats = StatsOf(DType::kF32, Bytes(values));
  EXPECT_EQ(stats.elements, 8u);
  EXPECT_EQ(stats.finite, 5u);
  EXPECT_EQ(stats.zeros, 2u);
  EXPECT_EQ(stats.nan, 1u);
  EXPECT_EQ(stats.infinite, 2u);
  EXPECT_EQ(stats.min, -3);
  EXPECT_EQ(stats.max, 2);
  EXPECT_EQ(stats.mean, 0);
  EXPECT_DOUBLE_EQ(static_cast<double>(stats.Std()), std::sqrt(14.0 / 5));
}

TEST(TensorStats, OfNothing) {
  const TensorStats stats = StatsOf(DType::kBF16, {});
  EXPECT_EQ(stats.elements, 0u);
  EXPECT_EQ(stats.finite, 0u);
  EXPECT_EQ(stats.Std(), 0);
}

TEST(TensorStats, LosesNoDigitOfAnInteger) {
  const std::vector<uint64_t> large = {UINT64_MAX, UINT64_MAX - 1};
  const TensorStats stats = StatsOf(DType::kU64, Bytes(large));
  EXPECT_EQ(static_cast<uint64_t>(stats.max), UINT64_MAX);
  EXPECT_EQ(static_cast<uint64_t>(stats.min), UINT64_MAX - 1);
  const std::vector<int64_t> small = {INT64_MIN, INT64_MIN + 1};
  EXPECT_EQ(static_cast<int64_t>(StatsOf(DType::kI64, Bytes(small)).min), INT64_MIN);
  EXPECT_EQ(static_cast<int64_t>(StatsOf(DType::kI64, Bytes(small)).max), INT64_MIN + 1);
}

TEST(TensorStats, PartsTogetherAreTheWhole) {
  std::vector<double> values;
  for (int i = 0; i < 10000; ++i) values.push_back(std::sin(i) * 1e3 + 1e6);
  const TensorStats whole = StatsOf(DType::kF64, Bytes(values));
  TensorStats parts;
  for (size_t at = 0; at < values.size(); at += 777) {
    const std::vector<double> part(
        values.begin() + static_cast<ptrdiff_t>(at),
        values.begin() + static_cast<ptrdiff_t>(std::min(values.size(), at + 777)));
    parts.Append(StatsOf(DType::kF64, Bytes(part)));
  }
  EXPECT_EQ(parts.elements, whole.elements);
  EXPECT_NEAR(static_cast<double>(parts.mean), static_cast<double>(whole.mean), 1e-6);
  EXPECT_NEAR(static_cast<double>(parts.Std()), static_cast<double>(whole.Std()), 1e-9);
}

TEST(TensorValues, SmallFloats) {
  const auto value = [](DType dtype, uint8_t code) {
    const auto byte = static_cast<std::byte>(code);
    double number = 0;
    DecodeNumbers(dtype, std::span(&byte, 1), std::span(&number, 1));
    return number;
  };
  EXPECT_EQ(value(DType::kF8E4M3, 0x7e), 448);
  EXPECT_TRUE(std::isnan(value(DType::kF8E4M3, 0x7f)));
  EXPECT_EQ(value(DType::kF8E4M3, 0x01), std::ldexp(1, -9));
  EXPECT_EQ(value(DType::kF8E5M2, 0x7b), 57344);
  EXPECT_EQ(value(DType::kF8E5M2, 0xfc), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(value(DType::kF8E4M3Fnuz, 0x7f), 240);
  EXPECT_TRUE(std::isnan(value(DType::kF8E4M3Fnuz, 0x80)));
  EXPECT_EQ(value(DType::kF8E5M2Fnuz, 0x7f), 57344);
  EXPECT_EQ(value(DType::kF8E8M0, 127), 1);
}

ValueDiff Diff(const std::vector<float>& a, const std::vector<float>& b, Tolerance tolerance = {}) {
  return DiffOf(DType::kF32, Bytes(a), DType::kF32, Bytes(b), tolerance, 100);
}

TEST(TensorDiff, CountsBitsAndValues) {
  const ValueDiff diff = Diff({1, 0, kNaN, kInf, 4, 5}, {1, -0.0F, kNaN, kInf, 4.5F, kNaN});
  EXPECT_EQ(diff.elements, 6u);
  EXPECT_EQ(diff.bits, 3u);    // the zero, the 4, the 5
  EXPECT_EQ(diff.values, 2u);  // not the zero
  EXPECT_EQ(diff.beyond, 2u);
  EXPECT_EQ(diff.first, 101u);
  EXPECT_EQ(diff.max_abs, 0.5);
  EXPECT_NEAR(static_cast<double>(diff.max_rel), 0.5 / 4.5, 1e-12);
}

TEST(TensorDiff, ATolerance) {
  EXPECT_EQ(Diff({1, 2}, {1.1F, 2.1F}, {0.2, 0}).beyond, 0u);
  EXPECT_EQ(Diff({1, 2}, {1.1F, 2.1F}, {0.05, 0}).beyond, 2u);
  EXPECT_EQ(Diff({1, 100}, {1.1F, 101}, {0, 0.02}).beyond, 1u);
  EXPECT_EQ(Diff({kInf}, {1}, {1e30, 1e30}).beyond, 1u);
  EXPECT_EQ(Diff({kNaN}, {1}, {1e30, 1e30}).beyond, 1u);
}

TEST(TensorDiff, OtherKindsOfNaNDifferInBits) {
  const float odd = std::bit_cast<float>(0x7fc00001U);
  const ValueDiff diff = Diff({kNaN}, {odd});
  EXPECT_EQ(diff.bits, 1u);
  EXPECT_EQ(diff.values, 0u);
}

TEST(TensorDiff, AcrossTypesByValue) {
  const std::vector<float> a = {1, 2, 3};
  const std::vector<double> b = {1, 2, 3.5};
  const ValueDiff diff = DiffOf(DType::kF32, Bytes(a), DType::kF64, Bytes(b), {}, 0);
  EXPECT_EQ(diff.bits, 1u);
  EXPECT_EQ(diff.values, 1u);
  EXPECT_EQ(diff.first, 2u);
  EXPECT_EQ(diff.max_abs, 0.5);
}

}  // namespace
}  // namespace ckptfs
