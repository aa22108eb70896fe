// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/dtype.h"

#include <gtest/gtest.h>

namespace ckptfs {
namespace {

TEST(DType, NamesGoBothWays) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(DTypeFromName(DTypeName(dtype)), dtype);
    if (!SafetensorsName(dtype).empty()) {
      EXPECT_EQ(DTypeFromSafetensors(SafetensorsName(dtype)), dtype);
    }
    if (!TorchName(dtype).empty()) {
      EXPECT_EQ(DTypeFromTorch(TorchName(dtype)), dtype);
    }
  }
  EXPECT_FALSE(DTypeFromName(""));
  EXPECT_FALSE(DTypeFromTorch(""));
  EXPECT_FALSE(DTypeFromSafetensors("f32"));
}

TEST(DType, Widths) {
  EXPECT_EQ(ByteWidth(DType::kF32), 4u);
  EXPECT_EQ(ByteWidth(DType::kC128), 16u);
  EXPECT_EQ(ByteWidth(DType::kF8E8M0), 1u);
  EXPECT_EQ(ByteWidth(DType::kF4), 0u);
  EXPECT_EQ(BitWidth(DType::kF6E2M3), 6u);
}

}  // namespace
}  // namespace ckptfs
