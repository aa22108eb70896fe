// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/shape.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

TEST(Shape, CountsElements) {
  EXPECT_EQ(*ElementCount({}), 1u);
  EXPECT_EQ(*ElementCount({2, 3}), 6u);
  EXPECT_EQ(*ElementCount({2, 0, 3}), 0u);
}

TEST(Shape, RefusesOverflowAlsoBesideAZero) {
  const uint64_t big = uint64_t{1} << 40;
  EXPECT_FALSE(ElementCount({big, big}));
  EXPECT_FALSE(ElementCount({big, 0, big}));
  EXPECT_FALSE(ElementCount(Shape(kMaxDimensions + 1, 1)));
  EXPECT_TRUE(ElementCount(Shape(kMaxDimensions, 1)));
  EXPECT_FALSE(ByteCount({uint64_t{1} << 62}, DType::kF64));
}

TEST(Shape, SubByteTypesRoundUp) {
  EXPECT_EQ(*ByteCount({3}, DType::kF4), 2u);
  EXPECT_EQ(*ByteCount({3}, DType::kF6E2M3), 3u);
  EXPECT_EQ(*ByteCount({3}, DType::kF32), 12u);
}

TEST(Shape, StridesAndText) {
  EXPECT_EQ(RowMajorStrides({2, 3, 4}), (std::vector<uint64_t>{12, 4, 1}));
  EXPECT_EQ(ShapeToString({2, 3}), "[2, 3]");
  EXPECT_EQ(ShapeToString({}), "[]");
}

}  // namespace
}  // namespace ckptfs
