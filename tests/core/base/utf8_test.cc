// SPDX-License-Identifier: Apache-2.0
#include "core/base/utf8.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

namespace ckptfs {
namespace {

TEST(Utf8Test, AnyBytesComeBack) {
  std::mt19937 random(7);
  // Letters of two to four bytes, their parts, and characters of the private range.
  const std::string_view pieces[] = {
      "a",       "\xe9",         "\xc3\xa9",         "\xe2\x82",         "\xe2\x82\xac",
      "\xff",    "\xed\xa0\x80", "\xf4\x8f\xba\x80", "\xf4\x8f\xbb\xbf", "\xf0\x9f\x98\x80",
      "\xc0\x80"};
  for (int i = 0; i < 2000; ++i) {
    std::string bytes;
    for (uint32_t left = random() % 9; left > 0; --left) {
      if (random() % 2 == 0) {
        bytes += pieces[random() % std::size(pieces)];
      } else {
        bytes += static_cast<char>(random());
      }
    }
    const std::string text = Utf8OfBytes(bytes);
    EXPECT_EQ(BytesOfUtf8(nlohmann::json::parse(nlohmann::json(text).dump()).get<std::string>()),
              bytes);
  }
}

TEST(Utf8Test, TextsStayAsTheyAre) {
  for (const std::string text : {"", "run7/step", "\xc3\xa9t\xc3\xa9", "\xf0\x9f\x98\x80"}) {
    EXPECT_EQ(Utf8OfBytes(text), text);
    EXPECT_EQ(BytesOfUtf8(text), text);
  }
}

}  // namespace
}  // namespace ckptfs
