// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/step_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "core/base/strings.h"
#include "core/store/lives.h"
#include "core/store/store.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

class StepMapTest : public ::testing::Test {
 protected:
  using Entry = std::shared_ptr<StepEntry>;

  Entry Make(const std::string& id, uint64_t iteration) {
    StepRecord record;
    record.run = "run";
    record.id = id;
    record.iteration = iteration;
    record.mtime_ns = static_cast<int64_t>(iteration * 7 % 1000);
    return std::make_shared<StepEntry>(catalogue_, record, RootMap(), ViewFormats(), recent_);
  }

  // All that a map says is what a plain one with the same steps says.
  static void Compare(const StepMap& map, const std::map<std::string, Entry>& wanted) {
    ASSERT_EQ(map.size(), wanted.size());
    EXPECT_EQ(map.empty(), wanted.empty());
    auto next = wanted.begin();
    Entry latest;
    int64_t mtime_ns = 0;
    EXPECT_FALSE(map.Any([&](const std::string& id, const Entry& step) {
      EXPECT_EQ(id, next->first);
      EXPECT_EQ(step, next->second);
      EXPECT_EQ(map.Find(id), step);
      if (!latest || IsOlder(latest->record(), step->record())) latest = step;
      mtime_ns = std::max(mtime_ns, step->record().mtime_ns);
      ++next;
      return false;
    }));
    EXPECT_EQ(next, wanted.end());
    EXPECT_EQ(map.latest(), latest);
    EXPECT_EQ(map.mtime_ns(), mtime_ns);
    EXPECT_EQ(map.Find(""), nullptr);
    EXPECT_EQ(map.Find("step55x"), nullptr);
    EXPECT_EQ(map.Find("zzz"), nullptr);
  }

  TemporaryDirectory directory_;
  std::unique_ptr<Store> store_ = *Store::Open(directory_.path() + "/store", true);
  StepCatalogue catalogue_{*store_};
  RecentSteps recent_{1};
};

TEST_F(StepMapTest, SaysWhatAPlainMapSays) {
  std::mt19937 random(7);
  StepMap map;
  std::map<std::string, Entry> wanted;
  Compare(map, wanted);
  for (int round = 0; round < 300; ++round) {
    const StepMap before = map;
    const auto wanted_before = wanted;
    std::map<std::string, Entry> changes;
    // Now and then many at once; more come than go, until near the end all go.
    const size_t count = round % 20 == 0 ? 200 : 1 + random() % 3;
    for (size_t i = 0; i < count; ++i) {
      const std::string id = StrCat("step", random() % 900);
      const bool gone = round > 280 || random() % 4 == 0;
      changes[id] = gone ? nullptr : Make(id, random() % 1000);
    }
    if (round == 299) {
      for (const auto& [id, step] : wanted) changes[id] = nullptr;
    }
    std::vector<StepMap::Change> sorted;
    for (const auto& [id, step] : changes) {
      sorted.push_back({id, step});
      if (step) wanted[id] = step;
      if (!step) wanted.erase(id);
    }
    map = map.With(sorted);
    Compare(map, wanted);
    Compare(before, wanted_before);  // its holders do not see a change
  }
  EXPECT_TRUE(map.empty());
}

TEST_F(StepMapTest, AChangeCopiesFewOfManySteps) {
  std::vector<Entry> entries;
  StepMap map;
  for (int i = 0; i < 2000; ++i) {
    entries.push_back(Make(StrCat("step", i), static_cast<uint64_t>(i)));
    map = map.With({{StrCat("step", i), entries.back()}});
  }
  std::vector<long> before;
  for (const Entry& entry : entries) before.push_back(entry.use_count());
  const StepMap more = map.With({{"step1234x", Make("step1234x", 3000)}});
  size_t copied = 0;
  for (size_t i = 0; i < entries.size(); ++i) copied += entries[i].use_count() != before[i];
  EXPECT_EQ(more.size(), 2001u);
  EXPECT_GT(copied, 0u);
  EXPECT_LE(copied, 64u);
}

}  // namespace
}  // namespace ckptfs
