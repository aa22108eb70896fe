// SPDX-License-Identifier: Apache-2.0

#include "core/base/lru.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace ckptfs {
namespace {

using Texts = Lru<int, std::string>;

Texts MakeTexts(uint64_t limit) {
  return Texts(limit, [](const std::string& text) { return text.size(); });
}

std::vector<int> Keys(const Texts& texts) {
  std::vector<int> keys;
  texts.ForEach([&](int key, const std::string&) { keys.push_back(key); });
  return keys;
}

TEST(LruTest, DropsTheOneUsedLongestAgo) {
  Texts texts = MakeTexts(10);
  texts.Insert(1, "aaaa");
  texts.Insert(2, "bbbb");
  EXPECT_EQ(texts.Find(1), "aaaa");
  texts.Insert(3, "cccc");
  EXPECT_EQ(Keys(texts), (std::vector<int>{3, 1}));
  EXPECT_EQ(texts.weight(), 8u);
  EXPECT_EQ(texts.Find(2), std::nullopt);
}

TEST(LruTest, InsertKeepsTheFirstReplaceTheLast) {
  Texts texts = MakeTexts(10);
  EXPECT_EQ(texts.Insert(1, "first"), "first");
  EXPECT_EQ(texts.Insert(1, "second"), "first");
  texts.Replace(1, "third!");
  EXPECT_EQ(texts.Find(1), "third!");
  EXPECT_EQ(texts.weight(), 6u);
  EXPECT_EQ(texts.size(), 1u);
}

TEST(LruTest, OneAboveTheBoundStaysAlone) {
  Texts texts = MakeTexts(4);
  texts.Insert(1, "a");
  texts.Insert(2, "longer than four");
  EXPECT_EQ(Keys(texts), std::vector<int>{2});
  texts.Insert(3, "c");
  EXPECT_EQ(Keys(texts), std::vector<int>{3});
  EXPECT_EQ(texts.weight(), 1u);
}

TEST(LruTest, DropsByPredicate) {
  Texts texts = MakeTexts(100);
  for (int i = 0; i < 6; ++i) texts.Insert(i, "xx");
  EXPECT_EQ(texts.DropIf([](int key, const std::string&) { return key % 2 == 0; }), 3u);
  EXPECT_EQ(Keys(texts), (std::vector<int>{5, 3, 1}));
  EXPECT_EQ(texts.weight(), 6u);
}

// A value whose end looks into the cache it came from: deadlock if it were
// destroyed under the lock.
TEST(LruTest, ValuesEndOutsideTheLock) {
  Lru<int, std::shared_ptr<int>> values(2);
  size_t seen = 0;
  const auto make = [&](int i) {
    return std::shared_ptr<int>(new int(i), [&](int* value) {
      seen = values.size();
      delete value;
    });
  };
  for (int i = 0; i < 4; ++i) values.Insert(i, make(i));
  EXPECT_EQ(seen, 2u);
  values.Replace(3, make(5));
  values.DropIf([](int, const auto&) { return true; });
  EXPECT_EQ(seen, 0u);
}

}  // namespace
}  // namespace ckptfs
