// SPDX-License-Identifier: Apache-2.0

#include "mount/shell_words.h"

#include <gtest/gtest.h>

#include "mount/printable.h"

namespace ckptfs {
namespace {

TEST(ShellWordsTest, AreQuotedWhereTheyHaveTo) {
  for (const char* plain : {"/data/run-7", "--layout", "a=b,c"}) EXPECT_EQ(ShellWord(plain), plain);
  EXPECT_EQ(ShellWord(""), "''");
  EXPECT_EQ(ShellWord("a b"), "'a b'");
  EXPECT_EQ(ShellWord("$(x)`y`*"), "'$(x)`y`*'");
  EXPECT_EQ(ShellWord("a job's"), "'a job'\\''s'");
  EXPECT_EQ(ShellWord("größe"), "'größe'");
}

TEST(ShellWordsTest, WhatIsNotPrintableIsSpelledForTheShell) {
  const std::string word = ShellWord("a\n\x1b'\\\xff");
  EXPECT_EQ(word, "$'a\\x0a\\x1b\\'\\\\\\xff'");
  EXPECT_EQ(Printable(word), word);
}

}  // namespace
}  // namespace ckptfs
