// SPDX-License-Identifier: Apache-2.0
//
// A received step on its way into a store: it is in memory, or durable, or, whenever the
// machine stops, one of both and nothing else.
#include <gtest/gtest.h>

#include <cstring>

#include "core/blob/chunk_digests.h"
#include "core/blob/chunk_list.h"
#include "core/io/file_root.h"
#include "core/io/memory_root.h"
#include "core/store/step_catalogue.h"
#include "formats/families/shipped.h"
#include "mount/daemon/snapshot_keeper.h"
#include "tests/snapshot/landings.h"
#include "tests/snapshot/training.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing_support::BytesOf;
using testing_support::RankMemory;
using testing_support::StoreLanding;

// One rank's file, whose parameters it declares itself.
ReceivedStep Received(uint64_t step, uint64_t elements = 150'000) {
  RankMemory memory({5000, 9, elements});
  memory.Fill(static_cast<unsigned char>(step));
  Capture capture = memory.Save(step, 0);
  for (const CapturedTensor& tensor : capture.tensors) {
    capture.parameters.push_back({tensor.parameter, "trainable"});
  }
  const auto file = CaptureFile::Make(std::move(capture), 0, 1);
  auto bytes = std::make_shared<std::string>(file->bytes(), '\0');
  for (const bool lazy : {false, true}) {
    for (const CopyRun& run : file->Runs(0, file->bytes(), lazy)) {
      std::memcpy(bytes->data() + run.at, run.from, run.bytes);
    }
  }
  ReceivedFile received;
  received.bytes = bytes->size();
  const auto all = std::as_bytes(std::span(*bytes));
  received.rope = {all.first(100'000), all.subspan(100'000)};
  received.chunks = ChunkDigestsOf(*bytes);
  received.lease = bytes;
  return {{"run", "job", 1}, step, {std::move(received)}};
}

MemoryStep StepOf(Store& store, const ReceivedStep& received) {
  const FamilySet families = *ShippedFamilies();
  const auto save = SaveBytes::Of(PartOf(received), SaveBytes::Moves::kNever);
  auto step = MemoryStepOf(store, save, families);
  EXPECT_TRUE(step) << step.error().message;
  return *std::move(step);
}

// The digests of the file's chunks lie beside it, and the manifest has theirs.
void ExpectList(const Storage& disk, const Step& step, const ReceivedStep& received) {
  const Blob& blob = step.model.blobs[0];
  EXPECT_TRUE(blob.chunks.empty());
  ASSERT_NE(blob.chunk_list, Digest{});
  const std::shared_ptr<const Storage> borrowed(std::shared_ptr<void>(), &disk);
  const auto list = ReadChunkList(*RootBelow(borrowed, "blobs"), blob);
  ASSERT_TRUE(list) << list.error().message;
  EXPECT_EQ(*list, received.files[0].chunks);
}

TEST(SnapshotStoreTest, ItIsTheSameStepInMemoryAndOnDisk) {
  const auto storage = std::make_shared<MemoryRoot>("storage");
  const auto store = *Store::OpenOn(storage);
  StepCatalogue catalogue(*store);
  const ReceivedStep received = Received(3);
  const auto held = catalogue.Hold(StepOf(*store, received));
  ASSERT_TRUE(held) << held.error().message;
  EXPECT_EQ(held->id, "3");
  const auto in_memory = *catalogue.Load(*held);
  const auto stored = catalogue.Persist(*held);
  ASSERT_TRUE(stored) << stored.error().message;
  EXPECT_EQ(stored->manifest, held->manifest);
  const std::string path = StrCat("blobs/", in_memory->model.blobs[0].path);
  EXPECT_EQ(*ReadWhole(*storage, path, 1 << 24), BytesOf(received.files[0]));
  ExpectList(*storage, **store->Load(*stored), received);
}

// It is written by several threads, past the page cache.
TEST(SnapshotStoreTest, ALargeOneIsTheSameOnDisk) {
  const TemporaryDirectory directory;
  const auto store = *Store::Open(directory.path(), true);
  StepCatalogue catalogue(*store);
  const ReceivedStep received = Received(3, 5'000'000);
  const auto held = *catalogue.Hold(StepOf(*store, received));
  const auto stored = catalogue.Persist(held);
  ASSERT_TRUE(stored) << stored.error().message;
  const auto step = *store->Load(*stored);
  const auto bytes = ReadWhole(FileRoot(store->blobs()), step->model.blobs[0].path, 1 << 26);
  ASSERT_TRUE(bytes) << bytes.error().message;
  EXPECT_TRUE(*bytes == BytesOf(received.files[0]));
}

// A trainer can write to its arena whenever it likes.
TEST(SnapshotStoreTest, BytesThatChangeBeforeTheyAreWrittenAreNoStep) {
  for (const uint64_t at : {uint64_t{0}, uint64_t{9} << 20, uint64_t{20'020'000}}) {
    const TemporaryDirectory directory;
    const auto store = *Store::Open(directory.path(), true);
    StepCatalogue catalogue(*store);
    const ReceivedStep received = Received(3, 5'000'000);
    const auto held = *catalogue.Hold(StepOf(*store, received));
    const auto span = received.files[0].rope[at < 100'000 ? 0 : 1];
    auto* byte = const_cast<std::byte*>(&span[at < 100'000 ? at : at - 100'000]);
    *byte ^= std::byte{1};
    const auto stored = catalogue.Persist(held);
    ASSERT_FALSE(stored) << at;
    EXPECT_EQ(stored.error().code, ErrorCode::kDataLoss);
    EXPECT_TRUE(ListFilesBelow(FileRoot(directory.path()), "blobs")->empty());
  }
}

// A full or failing disk, at every call: the step stays in memory, and the next try
// stores it whole.
TEST(SnapshotStoreTest, AStoreThatFailsTakesTheStepLater) {
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kExhausted}) {
    bool went_through = false;
    uint64_t failed = 0;
    for (uint64_t at = 1; !went_through; ++at) {
      ASSERT_LT(at, 500u);
      const auto disk = std::make_shared<MemoryRoot>("storage");
      const auto faulty = std::make_shared<FaultyStorage>(disk);
      const auto store = *Store::OpenOn(faulty);
      StepCatalogue catalogue(*store);
      const ReceivedStep received = Received(3);
      const auto held = *catalogue.Hold(StepOf(*store, received));
      const uint64_t before = faulty->calls();
      faulty->FailAt(at, code);
      const auto first = catalogue.Persist(held);
      went_through = faulty->calls() < before + at;
      auto stored = first;
      if (!first) {
        ++failed;
        EXPECT_TRUE(catalogue.Load(held)) << "still shown";
        stored = catalogue.Persist(held);
      }
      ASSERT_TRUE(stored) << at << ": " << stored.error().message;
      faulty->FailAt(1'000'000);  // every file is there from here on
      EXPECT_EQ(stored->id, "3") << at;
      const auto step = store->Load(*stored);
      ASSERT_TRUE(step) << at << ": " << step.error().message;
      const auto bytes = ReadWhole(*disk, StrCat("blobs/", (*step)->model.blobs[0].path), 1 << 24);
      ASSERT_TRUE(bytes) << bytes.error().message;
      EXPECT_EQ(*bytes, BytesOf(received.files[0])) << at;
      ExpectList(*disk, **step, received);
    }
    EXPECT_GT(failed, 3u);
  }
}

// The store may be away when others are to be shown what is new.
TEST(SnapshotStoreTest, ARefreshThatFailsLosesNoStep) {
  const auto store = *Store::OpenOn(std::make_shared<MemoryRoot>("storage"));
  StepCatalogue catalogue(*store);
  StoreLanding landing(*store, catalogue,
                       [](const StepRecord&) { return Fail(ErrorCode::kIo, "away"); });
  ReceivedStep received = Received(3);
  const std::weak_ptr<const void> lease = received.files[0].lease;
  const auto kept = landing.Keep(std::move(received));
  ASSERT_TRUE(kept) << kept.error().message;
  EXPECT_TRUE(store->Load(*kept));
  EXPECT_TRUE(lease.expired()) << "nothing holds the memory";
}

TEST(SnapshotStoreTest, WhatIsThrownOnTheWayIsTriedAgain) {
  bool threw = false;
  for (uint64_t at = 1; at < 500 && (threw || at == 1); ++at) {
    const auto faulty = std::make_shared<FaultyStorage>();
    const auto store = *Store::OpenOn(faulty);
    StepCatalogue catalogue(*store);
    ASSERT_FALSE(store->Resolve("run", "latest"));  // it has looked at what is there
    StoreLanding landing(*store, catalogue);
    landing->End();  // one more try, and no pause before it
    ReceivedStep received = Received(3);
    const std::weak_ptr<const void> lease = received.files[0].lease;
    const uint64_t before = faulty->calls();
    faulty->ThrowAt(at);
    const auto kept = landing.Keep(std::move(received));
    ASSERT_TRUE(kept) << at << ": " << kept.error().message;
    EXPECT_TRUE(lease.expired()) << at;
    threw = faulty->calls() >= before + at;
  }
}

TEST(SnapshotStoreTest, ASecondSaveOfAStepIsAnotherStep) {
  const auto store = *Store::OpenOn(std::make_shared<MemoryRoot>("storage"));
  StepCatalogue catalogue(*store);
  EXPECT_EQ(catalogue.Hold(StepOf(*store, Received(3)))->id, "3");
  EXPECT_EQ(catalogue.Hold(StepOf(*store, Received(3)))->id, "3-1");
}

TEST(SnapshotStoreTest, MemoryGoesWithItsLastReader) {
  const auto store = *Store::OpenOn(std::make_shared<MemoryRoot>("storage"));
  StepCatalogue catalogue(*store);
  ReceivedStep received = Received(3);
  const std::weak_ptr<const void> lease = received.files[0].lease;
  const auto held = *catalogue.Hold(StepOf(*store, received));
  received = {};
  auto reader = *catalogue.Load(held);
  ASSERT_TRUE(catalogue.Persist(held));
  EXPECT_FALSE(lease.expired());
  reader.reset();
  EXPECT_TRUE(lease.expired());
}

// The machine stops at every change of the store, with its effect and without.
TEST(SnapshotStoreTest, WheneverTheMachineStopsAStepIsWholeOrNotThere) {
  bool went_through = false;
  for (uint64_t at = 1; !went_through; ++at) {
    ASSERT_LT(at, 200u);
    for (const bool with_effect : {false, true}) {
      const auto disk = std::make_shared<MemoryRoot>("storage");
      const auto faulty = std::make_shared<FaultyStorage>(disk);
      const ReceivedStep received = Received(3);
      {
        const auto store = *Store::OpenOn(faulty);
        StepCatalogue catalogue(*store);
        const auto held = *catalogue.Hold(StepOf(*store, received));
        faulty->StopAt(at, with_effect);
        went_through = catalogue.Persist(held).has_value() && !faulty->stopped();
      }
      const auto store = *Store::OpenOn(disk);
      const auto record = store->Resolve("run", "latest");
      if (!record) {
        EXPECT_FALSE(went_through);
        continue;
      }
      const auto step = store->Load(*record);
      ASSERT_TRUE(step) << step.error().message;
      const Blob& blob = (*step)->model.blobs[0];
      const auto bytes = ReadWhole(*disk, StrCat("blobs/", blob.path), 1 << 24);
      ASSERT_TRUE(bytes) << bytes.error().message;
      EXPECT_EQ(*bytes, BytesOf(received.files[0]));
      ExpectList(*disk, **step, received);
    }
  }
}

}  // namespace
}  // namespace ckptfs
