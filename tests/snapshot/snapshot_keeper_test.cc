// SPDX-License-Identifier: Apache-2.0
//
// Steps between memory, spool and store: each is shown as long as it is there, and only once;
// what an earlier daemon has stored is found again.  snapshot_store_test.cc has the stores that
// fail.
#include "mount/daemon/snapshot_keeper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <map>
#include <thread>

#include "formats/families/shipped.h"
#include "tests/snapshot/landings.h"
#include "tests/snapshot/nodes.h"
#include "tests/snapshot/spooling.h"
#include "tests/support/faulty_storage.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing_support::kNever;
using testing_support::RankFileOf;
using testing_support::Save;
using testing_support::StoreLanding;

// Ranks' files, whose bytes depend on the step and the elements of their last weight.
ReceivedStep HandedOver(uint64_t step, const std::vector<uint64_t>& elements, bool again = false) {
  ReceivedStep received{{"run", "job", 1}, step, {}};
  for (uint32_t rank = 0; rank < elements.size(); ++rank) {
    const auto text = std::make_shared<std::string>(
        RankFileOf(step, rank, static_cast<uint32_t>(elements.size()), elements[rank]));
    received.files.push_back(
        {text->size(), {std::as_bytes(std::span(*text))}, ChunkDigestsOf(*text), again, text});
  }
  return received;
}

class SnapshotKeeperTest : public testing::Test {
 protected:
  void SetUp() override {
    storage_ = std::make_shared<FaultyStorage>();
    store_ = *Store::OpenOn(storage_);
    catalogue_ = std::make_unique<StepCatalogue>(*store_);
  }
  // `shown` is asked with each record that is shown.
  void Start(
      SnapshotKeeper::Refresh shown = [](const StepRecord&) { return Status(); },
      RetryRule retry = {}) {
    landing_.reset();
    SpoolerOptions options;
    options.budget = 1 << 20;
    options.patience = kNever;
    options.log = [](std::string_view) {};
    spooler_ = std::make_unique<Spooler>(*Spool::OpenOn(disk_, "store"), std::move(options));
    landing_ = std::make_unique<StoreLanding>(*store_, *catalogue_, std::move(shown),
                                              spooler_.get(), retry);
  }
  Result<StepRecord> Keep(ReceivedStep step) { return landing_->Keep(std::move(step)); }
  Landing& landing() { return **landing_; }
  SnapshotKeeper::Found Find(const PartAgain& part) { return *landing_->keeper().FindStored(part); }
  std::vector<std::string> Ids() const {
    std::vector<std::string> ids;
    for (const StepRecord& record : catalogue_->held()) ids.push_back(record.id);
    const auto stored = store_->Steps("run");
    for (const StepRecord& record : stored.value_or(std::vector<StepRecord>()))
      ids.push_back(record.id);
    return ids;
  }
  static PartAgain AgainOf(const ReceivedStep& step, uint32_t rank) {
    PartAgain part{step.name, step.step, rank, static_cast<uint32_t>(step.files.size()), {}};
    part.file.chunks = step.files[rank].chunks;
    return part;
  }

  std::shared_ptr<FaultyStorage> storage_;
  const std::shared_ptr<MemoryRoot> disk_ = std::make_shared<MemoryRoot>("disk");
  std::unique_ptr<Store> store_;
  std::unique_ptr<StepCatalogue> catalogue_;
  std::unique_ptr<Spooler> spooler_;
  std::unique_ptr<StoreLanding> landing_;
};

TEST_F(SnapshotKeeperTest, FilesOfAnotherStepAreNotOne) {
  Start();
  ReceivedStep received = HandedOver(3, {1000});
  received.step = 4;
  const auto kept = Keep(std::move(received));
  ASSERT_FALSE(kept);
  EXPECT_EQ(kept.error().code, ErrorCode::kInvalid);
  EXPECT_THAT(kept.error().message, HasSubstr("its files belong to step 3"));
  EXPECT_THAT(Ids(), ElementsAre());
}

// ---- what an earlier daemon has stored -----------------------------------------

TEST_F(SnapshotKeeperTest, WhatIsSaidAgainIsLookedForFirst) {
  Start();
  const auto first = Keep(HandedOver(3, {1000, 1000}));
  ASSERT_TRUE(first) << first.error().message;
  const auto again = Keep(HandedOver(3, {1000, 1000}, true));
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(again->id, first->id);
  EXPECT_THAT(Ids(), ElementsAre("3"));
  // Other bytes, or another world's, are another save of that step.
  EXPECT_EQ(Keep(HandedOver(3, {1000, 2000}, true))->id, "3-1");
  EXPECT_EQ(Keep(HandedOver(3, {1000}, true))->id, "3-2");
}

TEST_F(SnapshotKeeperTest, PartsOfDifferentSavesAreNotTheirs) {
  Start();
  ASSERT_TRUE(Keep(HandedOver(3, {1000, 1000})));
  ASSERT_TRUE(Keep(HandedOver(3, {2000, 2000})));
  EXPECT_EQ(Keep(HandedOver(3, {1000, 2000}, true))->id, "3-2");
}

TEST_F(SnapshotKeeperTest, APartOfAnotherWorldIsNotFound) {
  Start();
  const auto kept = *Keep(HandedOver(3, {1000}));
  PartAgain part = AgainOf(HandedOver(3, {1000}), 0);
  EXPECT_EQ(Find(part)->manifest, kept.manifest);
  part.world = 2;
  EXPECT_EQ(Find(part), std::nullopt);
}

TEST_F(SnapshotKeeperTest, AnAdoptedStepIsNotASave) {
  Start();
  const ReceivedStep received = HandedOver(3, {1000});
  const auto save = SaveBytes::Of(PartOf(received), SaveBytes::Moves::kNever);
  MemoryStep step = *MemoryStepOf(*store_, save, *ShippedFamilies());
  step.root = "/somewhere/else";
  ASSERT_TRUE(catalogue_->Persist(*catalogue_->Hold(std::move(step))));
  EXPECT_EQ(Find(AgainOf(received, 0)), std::nullopt);
}

TEST_F(SnapshotKeeperTest, ADamagedStepDoesNotHideAnother) {
  Start();
  const auto damaged = *Keep(HandedOver(3, {2000}));
  const auto kept = *Keep(HandedOver(3, {1000}));
  const std::string path = StrCat("manifests/", damaged.manifest.Hex());
  std::string text = *ReadWhole(*storage_, path, 1 << 20);
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
  ASSERT_TRUE(storage_->Remove(path));
  ASSERT_TRUE(storage_->PublishIfAbsent(path, std::as_bytes(std::span(text))));
  store_ = *Store::OpenOn(storage_);  // nothing of it is remembered
  catalogue_ = std::make_unique<StepCatalogue>(*store_);
  Start();
  EXPECT_EQ(store_->Load(damaged).error().code, ErrorCode::kDataLoss);
  EXPECT_EQ(Find(AgainOf(HandedOver(3, {1000}), 0))->manifest, kept.manifest);
}

// ---- what is shown -------------------------------------------------------------

TEST_F(SnapshotKeeperTest, WhatIsLostIsNotShown) {
  ReceivedStep received = HandedOver(3, {1000});
  auto* const byte = const_cast<std::byte*>(&received.files[0].rope[0].back());
  std::optional<StepRecord> seen;
  Start([&](const StepRecord& record) {
    if (!seen) *byte ^= std::byte{1};  // it is in memory
    seen = record;
    return Status();
  });
  const auto kept = Keep(std::move(received));
  ASSERT_FALSE(kept);
  EXPECT_EQ(kept.error().code, ErrorCode::kDataLoss);
  EXPECT_FALSE(catalogue_->Load(*seen));
  EXPECT_THAT(Ids(), ElementsAre());
}

TEST_F(SnapshotKeeperTest, WhatStaysInTheSpoolIsShownUntilTheEnd) {
  const Save save(3);
  std::promise<StepRecord> seen;
  Start([&](const StepRecord& record) {
    storage_->FailFrom(1);  // it is in memory
    seen.set_value(record);
    return Status();
  });
  auto kept = std::async(std::launch::async, [&] { return landing_->Keep(save.bytes); });
  const StepRecord record = seen.get_future().get();
  landing().End();
  EXPECT_FALSE(kept.get());
  EXPECT_TRUE(save.bytes->stays());
  EXPECT_TRUE(catalogue_->Load(record));
  EXPECT_EQ(ListFilesBelow(*disk_, "")->size(), 4u);
}

TEST_F(SnapshotKeeperTest, AStoreThatFailsGetsItFromTheSpool) {
  const Save save(3);
  bool first = true;
  Start([&](const StepRecord&) {
    if (std::exchange(first, false)) storage_->FailFrom(1);
    return Status();
  });
  auto kept = std::async(std::launch::async, [&] { return landing_->Keep(save.bytes); });
  while (!save.bytes->on_disk()) std::this_thread::yield();
  storage_->Mend();
  const auto record = kept.get();
  ASSERT_TRUE(record) << record.error().message;
  EXPECT_TRUE(testing_support::IsStepThere(storage_, "3", 3, 2));
  EXPECT_THAT(*ListFilesBelow(*disk_, ""), ElementsAre("format"));
}

// A save on disk does not get a name that another step has.
TEST_F(SnapshotKeeperTest, ATakenNameIsNotWaitedForForEver) {
  const Save save(3);
  bool first = true;
  Start(
      [&](const StepRecord&) {
        if (std::exchange(first, false)) storage_->FailFrom(1, ErrorCode::kExists);
        return Status();
      },
      {.pause = std::chrono::milliseconds(1), .limit = std::chrono::milliseconds(0)});
  const auto kept = landing_->Keep(save.bytes);
  ASSERT_FALSE(kept);
  EXPECT_EQ(kept.error().code, ErrorCode::kExists);
}

// One that waits behind another is shown meanwhile, and once.
TEST_F(SnapshotKeeperTest, NothingIsShownTwice) {
  const Save first(1), second(2), third(3);
  Mutex mutex;
  std::map<std::string, int> shown;
  std::promise<void> go, last;
  Start([&, gate = go.get_future().share()](const StepRecord& record) {
    int times = 0;
    {
      MutexLock lock(mutex);
      times = ++shown[record.id];
    }
    if (record.id == "1" && times == 2) gate.wait();  // the store has it, and nobody knows yet
    if (record.id == "3" && times == 1) last.set_value();
    return Status();
  });
  for (const Save* save : {&first, &second, &third}) {
    landing().Take(save->bytes, std::chrono::steady_clock::now());
  }
  last.get_future().wait();
  EXPECT_EQ(landing().status().durable, 0u);
  go.set_value();
  while (landing().status().durable < 3) std::this_thread::yield();
  EXPECT_THAT(Ids(), testing::UnorderedElementsAre("1", "2", "3"));
  MutexLock lock(mutex);
  for (const auto& [id, times] : shown) EXPECT_EQ(times, 2) << id;  // in memory, and stored
}

}  // namespace
}  // namespace ckptfs
