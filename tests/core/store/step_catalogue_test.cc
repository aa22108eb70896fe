// SPDX-License-Identifier: Apache-2.0
#include "core/store/step_catalogue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"
#include "core/io/memory_root.h"
#include "tests/core/store/sample_model.h"
#include "tests/support/faulty_storage.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing_support::NamesOf;
using testing_support::TinyModel;

class StepCatalogueTest : public testing::Test {
 protected:
  StepCatalogueTest()
      : storage_(std::make_shared<MemoryRoot>("storage")),
        store_(*Store::OpenOn(storage_)),
        catalogue_(*store_) {}

  // A step with one file of its own; `said`: what its manifest takes that for.
  MemoryStep InMemory(const std::string& id, const std::string& bytes, const std::string& said) {
    const auto owner = std::make_shared<const std::string>(bytes);
    Blob blob;
    blob.path = StrCat("held/", id, "/file");
    blob.stamp.size = said.size();
    blob.store_owned = true;
    blob.chunk_bytes = kChunkBytes;
    blob.chunks = ChunkDigestsOf(said);
    MemoryStep step{"run", "/root/" + id, "/root", TinyModel(id, 1, 1), nullptr};
    step.model.roots = {store_->blobs()};
    step.model.blobs = {blob};
    auto root = std::make_shared<MemoryRoot>("memory");
    const OwnerAndMode access{0600, 0, 0, false};
    EXPECT_TRUE(root->Add(blob.path, {std::as_bytes(std::span(*owner))}, owner, access));
    step.bytes = std::move(root);
    return step;
  }
  MemoryStep InMemory(const std::string& id, const std::string& bytes = "some bytes") {
    return InMemory(id, bytes, bytes);
  }
  StepRecord Publish(const StepModel& model) {
    auto record = store_->Publish("run", model, "/root/x", "/root");
    EXPECT_TRUE(record) << record.error().message;
    return record ? *record : StepRecord{};
  }
  std::vector<std::string> New() {
    const auto news = *catalogue_.News(generation_);
    generation_ = news.generation;
    all_ = news.all;
    std::vector<std::string> names = NamesOf(news);
    std::sort(names.begin(), names.end());
    return names;
  }

  std::shared_ptr<MemoryRoot> storage_;
  std::unique_ptr<Store> store_;
  StepCatalogue catalogue_;
  uint64_t generation_ = 0;
  bool all_ = false;
};

TEST_F(StepCatalogueTest, ShowsWhatIsStoredAndWhatIsHeld) {
  Publish(TinyModel("a", 1, 1));
  const auto held = catalogue_.Hold(InMemory("b"));
  ASSERT_TRUE(held) << held.error().message;
  EXPECT_THAT(New(), ElementsAre("a", "b"));
  EXPECT_TRUE(all_);
  EXPECT_FALSE(store_->Resolve("run", "b"));
  const auto step = *catalogue_.Load(*held);
  EXPECT_EQ(step->model.blobs[0].path, "held/b/file");
  EXPECT_EQ(step->roots.size(), 1u);
  EXPECT_EQ(*catalogue_.Load(*held), step);
  EXPECT_TRUE((*catalogue_.Load(*store_->Resolve("run", "a")))->roots.empty());
  EXPECT_THAT(New(), IsEmpty());
  Publish(TinyModel("c", 2, 2));
  EXPECT_THAT(New(), ElementsAre("c"));
  EXPECT_FALSE(all_);
}

TEST_F(StepCatalogueTest, StoredItIsTheSameStep) {
  const std::string bytes(3 * kChunkBytes + 5, 'x');
  const StepRecord held = *catalogue_.Hold(InMemory("a", bytes));
  EXPECT_THAT(New(), ElementsAre("a"));
  const auto stored = catalogue_.Persist(held);
  ASSERT_TRUE(stored) << stored.error().message;
  EXPECT_EQ(stored->manifest, held.manifest);
  EXPECT_EQ(stored->id, "a");
  EXPECT_THAT(New(), testing::Contains("a"));
  EXPECT_EQ(*ReadWhole(*storage_, "blobs/held/a/file", bytes.size()), bytes);
  EXPECT_TRUE((*catalogue_.Load(*stored))->roots.empty());
  EXPECT_EQ(store_->Resolve("run", "a")->manifest, held.manifest);
  // Held again it is there already.
  EXPECT_EQ(catalogue_.Hold(InMemory("a", bytes))->manifest, held.manifest);
  EXPECT_EQ(catalogue_.Persist(held).error().code, ErrorCode::kNotFound);
}

TEST_F(StepCatalogueTest, NamesAreFreeInBoth) {
  Publish(TinyModel("a", 1, 1));
  const StepRecord one = *catalogue_.Hold(InMemory("a"));
  EXPECT_EQ(one.id, "a-1");
  EXPECT_EQ(catalogue_.Hold(InMemory("a"))->id, "a-1");  // the very same
  const StepRecord two = *catalogue_.Hold(InMemory("a", "others"));
  EXPECT_EQ(two.id, "a-2");
  // Its name stays its own, also where the one before it is free by now.
  ASSERT_TRUE(store_->Remove(*store_->Resolve("run", "a")));
  EXPECT_EQ(catalogue_.Persist(two)->id, "a-2");
  EXPECT_EQ(catalogue_.Persist(one)->id, "a-1");
}

TEST_F(StepCatalogueTest, AnotherProcessThatTookTheNameWins) {
  const StepRecord held = *catalogue_.Hold(InMemory("a"));
  EXPECT_THAT(New(), ElementsAre("a"));
  Publish(TinyModel("a", 1, 1));
  EXPECT_THAT(New(), IsEmpty());  // the name shows what is held
  EXPECT_EQ(catalogue_.Persist(held)->id, "a-1");
  EXPECT_THAT(New(), testing::IsSupersetOf({"a", "a-1"}));
  EXPECT_NE(store_->Resolve("run", "a")->manifest, held.manifest);
}

TEST_F(StepCatalogueTest, BytesThatAreNotTheManifestsAreNeverStored) {
  for (const char* said : {"some bites", "some"}) {
    const StepRecord held = *catalogue_.Hold(InMemory("a", "some bytes", said));
    const auto stored = catalogue_.Persist(held);
    ASSERT_FALSE(stored);
    EXPECT_EQ(stored.error().code, ErrorCode::kDataLoss);
    EXPECT_THAT(stored.error().message, HasSubstr("held/a/file"));
    EXPECT_FALSE(store_->Resolve("run", "a"));
    EXPECT_FALSE(storage_->Stat("blobs/held/a/file"));
    EXPECT_TRUE(catalogue_.Load(held));  // it is still held
    ASSERT_TRUE(catalogue_.Release(held));
    EXPECT_FALSE(catalogue_.Load(held));
    EXPECT_FALSE(catalogue_.Release(held));
  }
}

TEST_F(StepCatalogueTest, OnlyBlobsThatTheStoreWillOwnAreHeld) {
  const auto refusal = [&](const std::function<void(StepModel&)>& edit) {
    MemoryStep step = InMemory("a");
    edit(step.model);
    const auto held = catalogue_.Hold(std::move(step));
    return held ? ErrorCode::kInternal : held.error().code;
  };
  EXPECT_EQ(refusal([](StepModel& m) { m.blobs[0].store_owned = false; }), ErrorCode::kInvalid);
  EXPECT_EQ(refusal([](StepModel& m) { m.blobs[0].stamp.inode = 5; }), ErrorCode::kInvalid);
  EXPECT_EQ(refusal([](StepModel& m) { m.roots[0] = "/elsewhere"; }), ErrorCode::kInvalid);
  EXPECT_EQ(refusal([](StepModel& m) { m.blobs[0].chunks.clear(); }), ErrorCode::kInvalid);
  EXPECT_EQ(refusal([](StepModel& m) { m.id = ".."; }), ErrorCode::kInvalid);
}

TEST_F(StepCatalogueTest, WhatCouldNotBeStoredIsNotHeld) {
  const auto latest = catalogue_.Hold(InMemory("latest"));
  ASSERT_FALSE(latest);
  EXPECT_EQ(latest.error().code, ErrorCode::kInvalid);
  EXPECT_THAT(latest.error().message, HasSubstr("'latest' is taken"));
  const std::string longest(200, 'x');  // its next attempt has no room
  EXPECT_TRUE(catalogue_.Hold(InMemory(longest)));
  EXPECT_EQ(catalogue_.Hold(InMemory(longest, "others")).error().code, ErrorCode::kInvalid);
  Publish(TinyModel("a", 1, 1));
  MemoryStep other = InMemory("b");
  other.root = "/another";
  EXPECT_EQ(catalogue_.Hold(std::move(other)).error().code, ErrorCode::kExists);
}

TEST(StepCatalogueFaultTest, AStoreThatCannotBeAskedHasNoTakenNames) {
  const auto storage = std::make_shared<FaultyStorage>();
  const auto store = *Store::OpenOn(storage);
  StepCatalogue catalogue(*store);
  MemoryStep step{"run", "/root/a", "/root", TinyModel("a", 1, 1), nullptr};
  step.model.roots = {store->blobs()};
  step.model.blobs.clear();
  step.model.atoms.clear();
  storage->FailAt(1);
  const uint64_t before = storage->calls();
  const auto held = catalogue.Hold(step);
  ASSERT_FALSE(held);
  EXPECT_EQ(held.error().code, ErrorCode::kIo) << held.error().message;
  EXPECT_EQ(storage->calls(), before + 1);  // not 10,000 names
  EXPECT_TRUE(catalogue.Hold(step));
}

}  // namespace
}  // namespace ckptfs
