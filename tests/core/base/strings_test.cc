// SPDX-License-Identifier: Apache-2.0

#include "core/base/strings.h"

#include <gtest/gtest.h>

#include <limits>

namespace ckptfs {
namespace {

TEST(StringsTest, NumbersAreTextsOfTheFewestDigits) {
  EXPECT_EQ(StrCat(0.0, " ", 0.01F > 0, " ", 0.01, " ", 1e-8, " ", 66.0), "0 1 0.01 1e-08 66");
  EXPECT_EQ(StrCat(-std::numeric_limits<double>::max()), "-1.7976931348623157e+308");
  EXPECT_EQ(StrCat(std::numeric_limits<double>::infinity(), 'x', uint8_t{66}), "infx66");
}

}  // namespace
}  // namespace ckptfs
