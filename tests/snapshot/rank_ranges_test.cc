// SPDX-License-Identifier: Apache-2.0
#include "snapshot/landing/rank_ranges.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "core/records/commit_records.h"
#include "snapshot/landing/received_step.h"

namespace ckptfs {
namespace {

TEST(RankRangesTest, IsTheSetOfWhatWasInserted) {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    constexpr uint32_t kWorld = 40;
    RankRanges ranges;
    std::set<uint32_t> truth, missing, elsewhere;
    for (int i = 0; i < round; ++i) {
      const uint32_t rank = random() % kWorld;
      EXPECT_EQ(ranges.Insert(rank), truth.insert(rank).second);
    }
    EXPECT_EQ(ranges.size(), truth.size());
    EXPECT_EQ(ranges.Missing(kWorld), kWorld - truth.size());
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      EXPECT_EQ(ranges.Contains(rank), truth.contains(rank)) << rank;
      if (rank % 5 == 2) elsewhere.insert(rank);
      if (!truth.contains(rank)) missing.insert(rank);
    }
    EXPECT_EQ(ranges.MissingText(kWorld), RanksText(missing));
    for (const uint32_t rank : elsewhere) missing.erase(rank);
    EXPECT_EQ(ranges.MissingText(kWorld, elsewhere), RanksText(missing));
  }
}

TEST(RankRangesTest, TheLastRankThereIsHasNoNeighbour) {
  RankRanges ranges;
  EXPECT_TRUE(ranges.Insert(UINT32_MAX));
  EXPECT_TRUE(ranges.Insert(0));
  EXPECT_FALSE(ranges.Contains(1));
  EXPECT_EQ(ranges.MissingText(3), "1-2");
}

// A thousand saves of a job of a million ranks wait.  One part moves one attempt, and whoever
// looks at what has moved meets neither the others nor the ranks.
TEST(IncomingStepsTest, OnlyWhatHasMovedIsLookedAt) {
  constexpr uint32_t kWorld = 1u << 20;
  constexpr uint64_t kSaves = 1000;
  IncomingSteps steps;
  for (uint64_t save = 1; save <= kSaves; ++save) {
    EXPECT_TRUE(steps.Begin({"run", "large", save * 64}, save, 0, false));
    EXPECT_FALSE(steps.Add({"run", "large", save * 64}, save, 0, kWorld, {}, {}));
  }
  EXPECT_EQ(steps.TakeMoved().size(), kSaves);
  EXPECT_TRUE(steps.TakeMoved().empty());
  const AttemptName one{"run", "large", 64};
  EXPECT_FALSE(steps.Add(one, 1, 7, kWorld, {}, {}));
  EXPECT_EQ(steps.TakeMoved(), std::set{one});
  const auto waiting = steps.Find(one);
  ASSERT_TRUE(waiting && waiting->untaken);
  EXPECT_EQ(waiting->here->MissingText(kWorld), "1-6, 8-1048575");
  EXPECT_FALSE(steps.Add({"run", "small", 64}, 1, 0, 2, {}, {}));
  EXPECT_TRUE(steps.Add({"run", "small", 64}, 1, 1, 2, {}, {}));
  EXPECT_EQ(steps.TakeMoved(), (std::set{AttemptName{"run", "small", 64}}));
  EXPECT_TRUE(steps.HasOpen("run", "large"));
  EXPECT_FALSE(steps.HasOpen("run", "small"));
  EXPECT_EQ(steps.OpenOf("run", "large").size(), kSaves);
  // Those that are late go some at a time.
  size_t turns = 1;
  while (steps.DropOlder(IncomingSteps::Time() + std::chrono::seconds(1))) ++turns;
  EXPECT_GT(turns, 10u);
  EXPECT_EQ(steps.size(), 0u);
  EXPECT_EQ(steps.TakeDropped().size(), kSaves);
}

}  // namespace
}  // namespace ckptfs
