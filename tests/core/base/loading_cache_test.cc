// SPDX-License-Identifier: Apache-2.0

#include "core/base/loading_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <vector>

namespace ckptfs {
namespace {

TEST(LoadingCacheTest, MakesAValueOnceForAllWhoWantIt) {
  LoadingCache<int, int> cache(8);
  std::atomic<int> made{0};
  std::promise<void> go_on;
  const std::shared_future<void> gate = go_on.get_future().share();
  std::vector<int> got(8);
  {
    std::vector<std::jthread> callers;
    for (int& value : got) {
      callers.emplace_back([&cache, &made, &value, gate] {
        value = cache
                    .Get(1,
                         [&]() -> Result<int> {
                           gate.wait();
                           return ++made;
                         })
                    .value();
      });
    }
    go_on.set_value();
  }
  EXPECT_EQ(made, 1);
  EXPECT_EQ(got, std::vector<int>(8, 1));
}

TEST(LoadingCacheTest, KeepsNoErrorAndNoException) {
  LoadingCache<int, int> cache(8);
  const auto failed = cache.Get(1, []() -> Result<int> { return Refuse("not yet"); });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().message, "not yet");
  const auto thrown = cache.Get(1, []() -> Result<int> { throw std::runtime_error("thrown"); });
  ASSERT_FALSE(thrown);
  EXPECT_EQ(thrown.error().message, "thrown");
  EXPECT_EQ(cache.Get(1, []() -> Result<int> { return 7; }).value(), 7);
  EXPECT_EQ(cache.Get(1, []() -> Result<int> { return 8; }).value(), 7);
}

TEST(LoadingCacheTest, DropsWhatWasUsedLongestAgoAndWhatIsAsked) {
  LoadingCache<int, int> cache(10, [](const int& value) { return static_cast<uint64_t>(value); });
  int made = 0;
  const auto get = [&](int key) {
    return cache
        .Get(key,
             [&]() -> Result<int> {
               ++made;
               return 5;
             })
        .value();
  };
  get(1), get(2), get(1), get(3);  // 2 goes
  EXPECT_EQ(made, 3);
  EXPECT_EQ(cache.size(), 2U);
  EXPECT_EQ(cache.weight(), 10U);
  get(1);
  EXPECT_EQ(made, 3);
  get(2);
  EXPECT_EQ(made, 4);
  cache.DropIf([](int key, int) { return key == 2; });
  EXPECT_EQ(cache.size(), 1U);
}

}  // namespace
}  // namespace ckptfs
