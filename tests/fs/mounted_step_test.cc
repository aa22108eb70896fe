// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/mounted_step.h"

#include <gtest/gtest.h>

#include <new>
#include <thread>
#include <vector>

#include "tests/fs/tree_fixture.h"

namespace ckptfs {
namespace {

using testing::FakeFormat;
using testing::TreeFixture;

// It used to leave the step unreadable until the daemon was started again.
TEST(RecentStepsTest, ALoadThatThrowsIsAnErrorAndTheNextOneWorks) {
  RecentSteps recent(2);
  const int place = 0;
  const auto failed =
      recent.Load(&place, []() -> Result<RecentSteps::StepPtr> { throw std::bad_alloc(); });
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ErrorCode::kExhausted);
  TreeFixture t;
  const StepRecord record = t.AddStep("r", "s", 1);
  StepEntry entry(t.catalogue(), record, {}, {}, recent);
  EXPECT_TRUE(recent.Load(&place, [&] { return entry.Mounted(); }));
}

TEST(RecentStepsTest, AreKeptWithinBoundsOfNumberAndMemory) {
  TreeFixture t;
  const StepRecord records[] = {t.AddStep("r", "a", 1), t.AddStep("r", "b", 2),
                                t.AddStep("r", "c", 3)};
  const auto loaded_of = [&](RecentSteps& recent) {
    for (const StepRecord& record : records) {
      StepEntry entry(t.catalogue(), record, {}, {}, recent);
      EXPECT_TRUE(entry.Mounted());
    }
    return recent.loaded();
  };
  RecentSteps two(2), one_by_memory(2, 1000), none_beside(1);
  EXPECT_EQ(loaded_of(two), 2u);
  EXPECT_EQ(loaded_of(one_by_memory), 1u);
  EXPECT_EQ(loaded_of(none_beside), 1u);
}

TEST(RecentStepsTest, BytesOfAStepCountOnce) {
  RecentSteps recent(2);
  TreeFixture t;
  StepEntry entry(t.catalogue(), t.AddStep("r", "s", 1), {}, {}, recent);
  const auto step = entry.Mounted().value();
  EXPECT_EQ(entry.Mounted().value(), step);
  EXPECT_EQ(recent.loaded(), 1u);
  std::vector<std::byte> bytes(10);
  ASSERT_TRUE(step->blobs().Read(BlobIndex{0}, 0, bytes));
  EXPECT_EQ(recent.bytes_read(), 10u);
}

TEST(ViewsTest, AFormatThatThrowsIsAnErrorAndTheNextLookWorks) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  t.format().throws = 1;
  const auto failed = t.Walk("/view/tp2/rank0/small.json");
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().code, ErrorCode::kExhausted);
  EXPECT_TRUE(t.Walk("/view/tp2/rank0/small.json"));
}

TEST(ViewsTest, AreOpenedOnceForAllWhoAskMeanwhile) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { EXPECT_TRUE(t.ReadAll("/view/tp4/rank1/small.json")); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(t.format().opens, 1u);
}

TEST(ViewsTest, AreKeptWithinABoundOfMemory) {
  TreeFixture t;
  t.AddStep("r", "s", 1);
  t.Mount();
  t.format().view_bytes = OpenViews::kBytes / 2 - 4096;  // room for two
  for (const char* layout : {"/view/tp1", "/view/tp2", "/view/tp1", "/view/tp2"}) {
    EXPECT_TRUE(t.List(layout));
  }
  EXPECT_EQ(t.format().opens, 2u) << "listings are kept, too";
  for (const char* layout : {"/view/tp4/extra", "/view/tp1/extra"}) EXPECT_TRUE(t.List(layout));
  EXPECT_EQ(t.format().opens, 4u) << "tp1 had to go";
}

TEST(ViewsTest, GoWithTheirStep) {
  TreeFixture t;
  RecentSteps recent(1);
  std::vector<std::unique_ptr<ViewFormat>> formats;
  formats.push_back(std::make_unique<FakeFormat>());
  StepEntry first(t.catalogue(), t.AddStep("r", "a", 1), {}, formats, recent);
  StepEntry second(t.catalogue(), t.AddStep("r", "b", 2), {}, formats, recent);
  const Layout layout = Layout::Parse("tp2").value();
  EXPECT_TRUE(first.Offer(layout));
  EXPECT_TRUE(first.Mounted().value()->Views(layout));
  EXPECT_EQ(recent.shared()->views.size(), 1u);
  EXPECT_TRUE(second.Mounted());  // the first has to go
  EXPECT_EQ(recent.shared()->views.size(), 0u);
  EXPECT_EQ(recent.loaded(), 1u);
}

}  // namespace
}  // namespace ckptfs
