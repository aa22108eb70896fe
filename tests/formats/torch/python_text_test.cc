// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/python_text.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "formats/torch/pickle_writer.h"

namespace ckptfs {
namespace {

std::optional<std::string> TextOf(const std::function<NodeId(PickleBuilder&)>& make) {
  PickleBuilder builder;
  const NodeId root = make(builder);
  const PickleTree tree = std::move(builder).Finish(root);
  return PythonText(RootOf(tree));
}

TEST(PythonTextTest, FloatsAreAsPythonPrintsThem) {
  const std::pair<double, const char*> cases[] = {
      {0.5, "0.5"},
      {1.0, "1.0"},
      {-0.0, "-0.0"},
      {100000.0, "100000.0"},
      {1e16, "1e+16"},
      {1e22, "1e+22"},
      {9999999999999998.0, "9999999999999998.0"},
      {1e-4, "0.0001"},
      {1e-5, "1e-05"},
      {1.5e-7, "1.5e-07"},
      {5e-324, "5e-324"},
      {0.1 + 0.2, "0.30000000000000004"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
      {std::nan(""), "nan"},
      {-std::numeric_limits<double>::infinity(), "-inf"}};
  for (const auto& [value, text] : cases) {
    EXPECT_EQ(TextOf([&](PickleBuilder& b) { return b.Float(value); }), text);
  }
}

TEST(PythonTextTest, OthersAreAsPythonPrintsThem) {
  using B = PickleBuilder;
  EXPECT_EQ(TextOf([](B& b) { return b.String("it's"); }), "it's");
  EXPECT_EQ(TextOf([](B& b) { return b.Int(-7); }), "-7");
  EXPECT_EQ(TextOf([](B& b) { return b.Bool(false); }), "False");
  EXPECT_EQ(TextOf([](B& b) { return b.None(); }), "None");
  EXPECT_EQ(TextOf([](B& b) { return b.Tuple({}); }), "()");
  EXPECT_EQ(TextOf([](B& b) { return b.Tuple({b.Tuple({b.Int(1)})}); }), "((1,),)");
  EXPECT_EQ(TextOf([](B& b) { return b.Tuple({b.String("a b"), b.Float(2)}); }), "('a b', 2.0)");
}

TEST(PythonTextTest, WhatIsNotKnownHasNone) {
  using B = PickleBuilder;
  EXPECT_EQ(TextOf([](B& b) { return b.Tuple({b.String("it's")}); }), std::nullopt);
  EXPECT_EQ(TextOf([](B& b) { return b.Tuple({b.String("\xc3\xa9")}); }), std::nullopt);
  EXPECT_EQ(TextOf([](B& b) { return b.List({}); }), std::nullopt);
  EXPECT_EQ(TextOf([](B& b) { return b.Global("os", "system"); }), std::nullopt);
  EXPECT_EQ(TextOf([](B& b) {
              NodeId nested = b.Int(1);
              for (int i = 0; i < 100; ++i) nested = b.Tuple({nested});
              return nested;
            }),
            std::nullopt);
}

}  // namespace
}  // namespace ckptfs
