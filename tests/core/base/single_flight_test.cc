// SPDX-License-Identifier: Apache-2.0

#include "core/base/single_flight.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ckptfs {
namespace {

using TextFlights = SingleFlight<int, std::string>;

TEST(SingleFlightTest, OneMakesForAllWhoAskMeanwhile) {
  TextFlights texts;
  std::atomic<int> made{0};
  std::atomic<int> equal{0};
  TextFlights::Flight leader = texts.Join(7);
  ASSERT_TRUE(leader.leads());
  std::atomic<int> joined{0};
  std::vector<std::thread> others;
  for (int i = 0; i < 8; ++i) {
    others.emplace_back([&] {
      TextFlights::Flight mine = texts.Join(7);
      ++joined;
      if (mine.leads()) {
        ++made;
        mine.Land("twice");
        return;
      }
      if (mine.Wait() == "once") ++equal;
    });
  }
  while (joined < 8) std::this_thread::yield();
  leader.Land("once");
  for (std::thread& other : others) other.join();
  EXPECT_EQ(made, 0);
  EXPECT_EQ(equal, 8);
  EXPECT_TRUE(texts.Join(7).leads());  // nothing is kept
}

TEST(SingleFlightTest, KeysDoNotWaitForEachOther) {
  TextFlights texts;
  const TextFlights::Flight one = texts.Join(1);
  EXPECT_EQ(texts.Do(2, [] { return std::string("two"); }), "two");
}

TEST(SingleFlightTest, AnExceptionIsAnErrorForAllAndForNobodyAfter) {
  TextFlights texts;
  const auto thrown = texts.Do(1, []() -> std::string { throw std::runtime_error("why"); });
  ASSERT_FALSE(thrown);
  EXPECT_EQ(thrown.error().code, ErrorCode::kInternal);
  EXPECT_EQ(thrown.error().message, "why");
  const auto memory = texts.Do(1, []() -> std::string { throw std::bad_alloc(); });
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().code, ErrorCode::kExhausted);
  EXPECT_EQ(texts.Do(1, [] { return std::string("fine"); }), "fine");
}

TEST(SingleFlightTest, ALeaderThatGoesReleasesTheOthers) {
  TextFlights texts;
  auto leader = std::make_unique<TextFlights::Flight>(texts.Join(1));
  const TextFlights::Flight other = texts.Join(1);
  ASSERT_FALSE(other.leads());
  leader.reset();
  EXPECT_FALSE(other.Wait());
}

}  // namespace
}  // namespace ckptfs
