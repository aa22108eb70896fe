// SPDX-License-Identifier: Apache-2.0
//
// The cost of publishing does not depend on how many steps there are; and news are told
// without looking at old steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "core/store/store.h"
#include "tests/core/store/counting_storage.h"
#include "tests/core/store/sample_model.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using testing_support::CountingStorage;
using testing_support::NamesOf;
using testing_support::StorageCalls;
using testing_support::TinyModel;

class StoreCostTest : public testing::Test {
 protected:
  StoreCostTest()
      : storage_(std::make_shared<CountingStorage>(std::make_shared<MemoryRoot>("memory"))),
        store_(*Store::OpenOn(storage_)) {}

  static StepModel Model(int i) { return TinyModel(StrCat("s", i), static_cast<uint64_t>(i), 1); }
  static StepRecord Publish(Store& store, const StepModel& model) {
    auto record = store.Publish("run", model, "/root/" + model.id, "/root");
    EXPECT_TRUE(record) << record.error().message;
    return record ? *record : StepRecord{};
  }
  // Returns the news since the store was last asked: "s3", "-s3" if it is gone.
  std::vector<std::string> New(Store& store) {
    const auto news = *store.News(generation_);
    all_ = news.all;
    generation_ = news.generation;
    return NamesOf(news);
  }

  std::shared_ptr<CountingStorage> storage_;
  std::unique_ptr<Store> store_;
  uint64_t generation_ = 0;
  bool all_ = false;
};

TEST_F(StoreCostTest, TheThousandthStepCostsWhatTheTenthDid) {
  for (const bool asked : {false, true}) {  // a process that also looks at the steps
    storage_ = std::make_shared<CountingStorage>(std::make_shared<MemoryRoot>("memory"));
    store_ = *Store::OpenOn(storage_);
    if (asked) {
      EXPECT_THAT(*store_->Runs(), IsEmpty());
    }
    StorageCalls tenth;
    for (int i = 1; i <= 1000; ++i) {
      storage_->Take();
      const StepModel model = Model(i);
      const RenderedStep rendered = *store_->Render(model);
      EXPECT_FALSE(*store_->FindPublished("run", model.id, rendered));
      ASSERT_TRUE(store_->Publish("run", model, rendered, "/root/x", "/root"));
      if (i == 10) tenth = storage_->Take();
    }
    EXPECT_EQ(storage_->Take(), tenth);
    EXPECT_LE(tenth.lists, 6u);
    EXPECT_LE(tenth.listed, 4u);
    EXPECT_EQ(tenth.writes, 2u);  // its manifest and its record
    EXPECT_THAT(*store_->Steps("run"), SizeIs(1000));
    // The same again finds itself.
    storage_->Take();
    EXPECT_EQ(Publish(*store_, Model(500)).id, "s500");
    EXPECT_LE(storage_->Take().lists, 4u);
  }
}

TEST_F(StoreCostTest, AnotherProcessPublishesAtTheSameCost) {
  for (int i = 1; i <= 100; ++i) Publish(*store_, Model(i));
  const auto other = *Store::OpenOn(storage_);  // as `ckptfs adopt` does for each step
  storage_->Take();
  Publish(*other, Model(101));
  const StorageCalls cost = storage_->Take();
  EXPECT_LE(cost.listed, 4u) << cost;
  EXPECT_THAT(*other->Steps("run"), SizeIs(101));
}

// ---- a run's name --------------------------------------------------------------

TEST_F(StoreCostTest, AClaimIsSettledOnceAndLostToANewerOne) {
  const StepRecord first = Publish(*store_, Model(1));
  EXPECT_FALSE(store_->Publish("run", Model(2), "/other/x", "/other"));
  Publish(*store_, Model(2));  // the refused one did not take the name away
  const StepRecord second = *store_->Resolve("run", "s2");
  ASSERT_TRUE(store_->Remove(first));
  EXPECT_FALSE(store_->Publish("run", Model(3), "/other/x", "/other"));
  ASSERT_TRUE(store_->Remove(second));
  ASSERT_TRUE(store_->Publish("run", Model(3), "/other/x", "/other"));
  EXPECT_FALSE(store_->Publish("run", Model(4), "/root/x", "/root"));
  const auto fresh = *Store::OpenOn(storage_);
  EXPECT_FALSE(fresh->Publish("run", Model(4), "/root/x", "/root"));
  ASSERT_TRUE(fresh->Publish("run", Model(4), "/other/x", "/other"));
}

// A publisher that stops between its claim and its look at the run leaves a claim
// that is not settled: the next one looks.
TEST_F(StoreCostTest, AClaimThatIsNotSettledIsLookedAt) {
  Publish(*store_, Model(1));
  const std::vector<std::string> claims = *ListFilesBelow(*storage_, "runs");
  EXPECT_THAT(claims, ElementsAre("runs/run/0", "runs/run/0.settled"));
  ASSERT_TRUE(storage_->Remove("runs/run/0.settled"));
  Publish(*store_, Model(2));
  EXPECT_THAT(*ListFilesBelow(*storage_, "runs"), SizeIs(2));
}

// ---- what is new ---------------------------------------------------------------

TEST_F(StoreCostTest, NewsAreWhatCameAndWentSince) {
  const StepRecord one = Publish(*store_, Model(1));
  EXPECT_THAT(New(*store_), ElementsAre("s1"));
  EXPECT_TRUE(all_);
  EXPECT_THAT(New(*store_), IsEmpty());
  EXPECT_FALSE(all_);
  Publish(*store_, Model(2));
  Publish(*store_, Model(1));  // nothing new
  ASSERT_TRUE(store_->Remove(one));
  EXPECT_THAT(New(*store_), ElementsAre("s2", "-s1"));
  Publish(*store_, Model(1));
  ASSERT_TRUE(store_->Refresh());
  EXPECT_THAT(New(*store_), ElementsAre("s1"));
  EXPECT_FALSE(all_);
  generation_ += 1000;  // of another store
  EXPECT_THAT(New(*store_), ElementsAre("s1", "s2"));
  EXPECT_TRUE(all_);
}

TEST_F(StoreCostTest, NewsOfOthersComeWithARefreshOfAllOrOfOneStep) {
  const auto other = *Store::OpenOn(storage_);
  for (int i = 1; i <= 50; ++i) Publish(*store_, Model(i));
  EXPECT_THAT(New(*other), SizeIs(50));
  const StepRecord record = Publish(*store_, Model(51));
  EXPECT_THAT(New(*other), IsEmpty());
  storage_->Take();
  ASSERT_TRUE(other->RefreshStep("run", "s51"));
  const StorageCalls cost = storage_->Take();
  EXPECT_LE(cost.listed, 1u);
  EXPECT_THAT(New(*other), ElementsAre("s51"));
  ASSERT_TRUE(other->RefreshStep("run", "s51"));  // nothing new
  ASSERT_TRUE(other->RefreshStep("run", "none"));
  EXPECT_THAT(New(*other), IsEmpty());
  EXPECT_EQ(other->Resolve("run", "s51")->manifest, record.manifest);
  ASSERT_TRUE(store_->Remove(record));
  Publish(*store_, Model(52));
  ASSERT_TRUE(other->RefreshStep("run", "s51"));
  EXPECT_THAT(New(*other), ElementsAre("-s51"));
  ASSERT_TRUE(other->Refresh());
  EXPECT_THAT(New(*other), ElementsAre("s52"));
  EXPECT_FALSE(all_);
}

TEST_F(StoreCostTest, NewsThatWereTooManyAreAll) {
  EXPECT_THAT(New(*store_), IsEmpty());
  const auto other = *Store::OpenOn(storage_);
  for (int i = 1; i <= 4200; ++i) Publish(*other, Model(i));
  ASSERT_TRUE(store_->Refresh());
  EXPECT_THAT(New(*store_), SizeIs(4200));
  EXPECT_TRUE(all_);
}

}  // namespace
}  // namespace ckptfs
