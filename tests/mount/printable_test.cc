// SPDX-License-Identifier: Apache-2.0

#include "mount/printable.h"

#include <gtest/gtest.h>

#include <string>

namespace ckptfs {
namespace {

TEST(PrintableTest, PlainTextStaysAsItIs) {
  for (const char* text : {"", "model.layers.0.weight", "größe/模型/🙂", "a\\b"}) {
    EXPECT_EQ(Printable(text), text);
  }
}

TEST(PrintableTest, WhatMovesTheCursorIsSpelled) {
  EXPECT_EQ(Printable("\x1b[2J"), "\\x1b[2J");
  EXPECT_EQ(Printable("a\nb\rc\td\x7f"), "a\\x0ab\\x0dc\\x09d\\x7f");
  EXPECT_EQ(Printable(std::string("\0x", 2)), "\\x00x");
  EXPECT_EQ(Printable("\xc2\x9b"), "\\xc2\\x9b") << "CSI as one character";
  EXPECT_EQ(Printable("\xe2\x80\xae"
                      "abc"),
            "\\xe2\\x80\\xae"
            "abc")
      << "right to left";
  EXPECT_EQ(Printable("\xe2\x80\xa8"), "\\xe2\\x80\\xa8") << "line separator";
}

TEST(PrintableTest, BytesThatAreNotUtf8AreSpelled) {
  EXPECT_EQ(Printable("\x9b"
                      "2J"),
            "\\x9b"
            "2J")
      << "CSI of eight bits";
  EXPECT_EQ(Printable("\xc3"), "\\xc3");
  EXPECT_EQ(Printable("\xc0\xaf"), "\\xc0\\xaf") << "overlong";
  EXPECT_EQ(Printable("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "surrogate";
  EXPECT_EQ(Printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80") << "beyond Unicode";
  EXPECT_EQ(Printable("\xe2\x82z"), "\\xe2\\x82z") << "cut off";
}

}  // namespace
}  // namespace ckptfs
