// SPDX-License-Identifier: Apache-2.0

#include "core/state/rival_orders.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace ckptfs {
namespace {

// The rivals as names with spaces between, and whether all were looked at.
std::vector<OwnableParameter> Matrices(const std::vector<std::string>& names) {
  std::vector<OwnableParameter> out;
  for (const std::string& name : names) out.push_back({name, {2, 2}});
  return out;
}

std::pair<std::set<std::string>, bool> RivalsOf(const std::vector<OwnableParameter>& model) {
  std::set<std::string> out;
  const bool all = ForEachRivalOrder(model, [&](const std::vector<size_t>& order) {
    std::string text;
    for (const size_t i : order) text.append(model[i].name).append(" ");
    out.insert(text);
    return false;
  });
  return {out, all};
}

TEST(RivalOrdersTest, ModulesMoveAmongTheirSiblings) {
  const auto [rivals, all] = RivalsOf(Matrices({"x.b.w", "x.b.b", "x.a.w", "x.c.w"}));
  EXPECT_TRUE(all);
  const std::set<std::string> wanted = {
      "x.c.w x.a.w x.b.b x.b.w ",  // reversed
      "x.a.w x.b.b x.b.w x.c.w ",  // sorted
      "x.c.w x.a.w x.b.w x.b.b ",  // modules
      "x.a.w x.b.w x.b.b x.c.w ", "x.a.w x.c.w x.b.w x.b.b ",
      "x.b.w x.b.b x.c.w x.a.w ", "x.c.w x.b.w x.b.b x.a.w ",
  };
  EXPECT_EQ(rivals, wanted);
}

TEST(RivalOrdersTest, NumberedSiblingsAndTheParametersOfAModuleKeepTheirOrder) {
  const auto [rivals, all] = RivalsOf(Matrices({"w", "0.w", "1.q.w", "1.k.w"}));
  EXPECT_TRUE(all);
  const std::set<std::string> wanted = {"1.k.w 1.q.w 0.w w ", "0.w 1.k.w 1.q.w w "};
  EXPECT_EQ(rivals, wanted);
}

TEST(RivalOrdersTest, ANormStaysWhereItIs) {
  const auto [rivals, all] =
      RivalsOf({{"b.w", {2, 2}}, {"norm.w", {2}}, {"a.w", {2, 2}}, {"norm.b", {2}}});
  EXPECT_TRUE(all);
  const std::set<std::string> wanted = {"norm.b a.w norm.w b.w ", "a.w b.w norm.b norm.w ",
                                        "a.w norm.w b.w norm.b "};
  EXPECT_EQ(rivals, wanted);
}

TEST(RivalOrdersTest, AModuleWithoutEndIsNotLookedAtWhole) {
  std::vector<std::string> names;
  for (size_t i = 0; i < 2000; ++i) names.push_back("m" + std::to_string(i) + ".w");
  size_t seen = 0;
  EXPECT_FALSE(ForEachRivalOrder(Matrices(names), [&](const std::vector<size_t>&) {
    ++seen;
    return false;
  }));
  EXPECT_LT(seen, 40'000u);
}

TEST(RivalOrdersTest, NothingIsLookedAtBehindTheOneThatWasSought) {
  size_t seen = 0;
  EXPECT_TRUE(ForEachRivalOrder(Matrices({"b.w", "a.w", "c.w"}),
                                [&](const std::vector<size_t>&) { return ++seen == 2; }));
  EXPECT_EQ(seen, 2u);
}

}  // namespace
}  // namespace ckptfs
