// SPDX-License-Identifier: Apache-2.0
//
// Tensors that did not change since a durable step: they are not written again, and no removal,
// collection or lie makes a later step lack them, or have other bytes.
#include "snapshot/trainer/kept_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>

#include "core/blob/chunk_digests.h"
#include "core/io/file_root.h"
#include "core/store/collect.h"
#include "core/store/step_catalogue.h"
#include "formats/families/shipped.h"
#include "mount/daemon/snapshot_keeper.h"
#include "snapshot/trainer/capture.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using testing::HasSubstr;

constexpr uint64_t kBaseElements = 40'000;
constexpr uint64_t kBaseBytes = 4 * kBaseElements;
constexpr size_t kHandedBytes = 100'000;  // handed over at once

// A rank that trains a head on a base, and its daemon.
class KeptTensorsTest : public testing::Test {
 protected:
  KeptTensorsTest() {
    for (std::string& tensor : memory_) tensor.assign(kBaseBytes, '\0');
    Train();
  }

  // Every value of the head is another one.
  void Train() {
    for (char& byte : memory_[1]) byte = static_cast<char>(byte * 5 + ++seed_);
  }
  std::string& base() { return memory_[0]; }
  std::string& head() { return memory_[1]; }

  Capture Captured(uint64_t step) const {
    Capture capture;
    capture.step = step;
    for (size_t i = 0; i < memory_.size(); ++i) {
      CapturedTensor tensor;
      tensor.parameter = i == 0 ? "base" : "head";
      tensor.kind = "weight";
      tensor.shape = {kBaseElements};
      tensor.from = reinterpret_cast<const std::byte*>(memory_[i].data());
      capture.tensors.push_back(std::move(tensor));
      capture.parameters.push_back({i == 0 ? "base" : "head", i == 0 ? "frozen" : "trainable"});
    }
    return capture;
  }

  // The rank's file, handed over.
  ReceivedStep HandOver(uint64_t step) {
    auto file = CaptureFile::Make(Captured(step), 0, 1, &kept_);
    EXPECT_TRUE(file) << file.error().message;
    auto bytes = std::make_shared<std::string>(file->bytes(), '\0');
    for (const CopyRun& run : file->Runs(0, file->bytes(), false)) {
      std::memcpy(bytes->data() + run.at, run.from, run.bytes);
    }
    auto digests = std::make_shared<TensorDigests>(file->TakeDigests());
    const auto all = std::as_bytes(std::span(*bytes));
    for (size_t at = 0; at < all.size(); at += kHandedBytes) {
      digests->Take(at, all.subspan(at, std::min(kHandedBytes, all.size() - at)));
    }
    kept_.Begin(step, digests, file->kept(), file->bytes());
    written_ = bytes->size();
    return Received(step, std::move(bytes));
  }
  static ReceivedStep Received(uint64_t step, std::shared_ptr<std::string> bytes) {
    ReceivedFile received;
    received.bytes = bytes->size();
    received.rope = {std::as_bytes(std::span(*bytes))};
    received.chunks = ChunkDigestsOf(*bytes);
    received.lease = bytes;
    ReceivedStep whole{{"run", "job", step}, step, {}};
    whole.files.push_back(std::move(received));
    return whole;
  }
  static std::string PlaceOf(const ReceivedStep& received) {
    const ReceivedPart part = PartOf(received);
    return PreparedPart{part.name, part.step, 0, 0, {}}.Directory();
  }
  Result<MemoryStep> InMemory(const ReceivedStep& received) {
    const FamilySet families = *ShippedFamilies();
    const auto save = SaveBytes::Of(PartOf(received), SaveBytes::Moves::kNever);
    return MemoryStepOf(*store_, save, families);
  }
  StepRecord Persist(const ReceivedStep& received) {
    auto step = InMemory(received);
    EXPECT_TRUE(step) << step.error().message;
    const auto held = catalogue_.Hold(*std::move(step));
    EXPECT_TRUE(held) << held.error().message;
    ExpectTruth(**catalogue_.Load(*held));
    const auto stored = catalogue_.Persist(*held);
    EXPECT_TRUE(stored) << stored.error().message;
    EXPECT_EQ(stored->manifest, held->manifest);
    return *stored;
  }
  // Saves what the memory holds, durably.
  StepRecord Save(uint64_t step) {
    const ReceivedStep received = HandOver(step);
    const StepRecord record = Persist(received);
    kept_.Durable(step, PlaceOf(received));
    truth_[step] = memory_;
    return record;
  }

  std::string ValueOf(const Step& step, std::string_view name) const {
    const auto parameter = step.model.FindParameter(name);
    const Atom& atom = step.model.atom(*step.model.FindAtom(*parameter, "weight"));
    std::string value(kBaseBytes, '\0');
    for (const FragmentSeries& series : atom.source.gathers.at(0).series) {
      const Fragment fragment = series.At(0);
      const Blob& blob = step.model.blob(fragment.blob);
      const auto root = step.roots.find(step.model.roots[blob.root]);
      const auto file = root == step.roots.end() ? FileRoot(store_->blobs()).Open(blob.path)
                                                 : root->second->Open(blob.path);
      EXPECT_TRUE(file) << file.error().message;
      const auto read = (*file)->Read(fragment.offset, kBaseBytes, "its value");
      EXPECT_TRUE(read) << read.error().message;
      value = *read;
    }
    return value;
  }
  void ExpectTruth(const Step& step) const {
    EXPECT_TRUE(ValueOf(step, "base") == memory_[0]);
    EXPECT_TRUE(ValueOf(step, "head") == memory_[1]);
  }
  void ExpectDurable(const StepRecord& record) const {
    const auto step = store_->Load(record);
    ASSERT_TRUE(step) << step.error().message;
    const auto& truth = truth_.at(record.iteration);
    EXPECT_TRUE(ValueOf(**step, "base") == truth[0]) << record.id;
    EXPECT_TRUE(ValueOf(**step, "head") == truth[1]) << record.id;
  }
  void Collect() const {
    const auto collected = store_->Collect({});
    ASSERT_TRUE(collected) << collected.error().message;
  }
  size_t FilesThere() const {
    return ListFilesBelow(FileRoot(store_->blobs()), "snapshots")->size();
  }

  const TemporaryDirectory directory_;
  const std::unique_ptr<Store> store_ = *Store::Open(directory_.path(), true);
  StepCatalogue catalogue_{*store_};
  KeptTensors kept_;
  std::array<std::string, 2> memory_;
  std::map<uint64_t, std::array<std::string, 2>> truth_;
  uint64_t written_ = 0;
  char seed_ = 0;
};

TEST_F(KeptTensorsTest, SavesAreWrittenWholeAfterARefusalTwiceAsManyEachTime) {
  Save(1);
  uint64_t step = 2;
  for (const int whole : {1, 2, 4}) {
    Train();
    HandOver(step);
    EXPECT_LT(written_, 2 * kBaseBytes) << "it names the base";
    kept_.Refused(step++);
    for (int i = 0; i < whole; ++i) {
      Train();
      Save(step++);
      EXPECT_GT(written_, 2 * kBaseBytes);
    }
  }
}

TEST_F(KeptTensorsTest, AFileOfWhichLittleWouldBeUsedIsNotNamed) {
  std::string small(kLeastKept, 's'), large(8 * kLeastKept, 'a');
  const auto captured = [&] {
    Capture capture;
    for (std::string* each : {&small, &large}) {
      CapturedTensor tensor;
      tensor.parameter = each == &small ? "small" : "large";
      tensor.kind = "weight";
      tensor.shape = {each->size() / 4};
      tensor.from = reinterpret_cast<const std::byte*>(each->data());
      capture.tensors.push_back(std::move(tensor));
    }
    return capture;
  };
  auto first = CaptureFile::Make(captured(), 0, 1, &kept_);
  ASSERT_TRUE(first) << first.error().message;
  std::string bytes(first->bytes(), '\0');
  for (const CopyRun& run : first->Runs(0, first->bytes(), false)) {
    std::memcpy(bytes.data() + run.at, run.from, run.bytes);
  }
  auto digests = std::make_shared<TensorDigests>(first->TakeDigests());
  digests->Take(0, std::as_bytes(std::span(bytes)));
  kept_.Begin(1, digests, {}, first->bytes());
  kept_.Durable(1, "snapshots/first");
  const auto same = CaptureFile::Make(captured(), 0, 1, &kept_);
  EXPECT_EQ(same->kept().size(), 2u);
  large[0] = 'b';
  const auto changed = CaptureFile::Make(captured(), 0, 1, &kept_);
  EXPECT_TRUE(changed->kept().empty());
}

TEST_F(KeptTensorsTest, WhatDidNotChangeIsNotWrittenAgain) {
  std::vector<StepRecord> records;
  for (uint64_t step = 1; step <= 4; ++step) {
    records.push_back(Save(step));
    EXPECT_EQ(written_ > 2 * kBaseBytes, step == 1) << step;
    Train();
  }
  for (const StepRecord& record : records) ExpectDurable(record);
  const auto last = *store_->Load(records.back());
  ASSERT_EQ(last->model.blobs.size(), 2u);
  const auto first = *store_->Load(records[0]);
  EXPECT_EQ(last->model.blobs[1].chunks, first->model.blobs[0].chunks);
  EXPECT_EQ(last->model.blobs[1].chunk_list, first->model.blobs[0].chunk_list);
}

TEST_F(KeptTensorsTest, AByteInTheMiddleIsAChange) {
  Save(1);
  base()[kBaseBytes / 2] ^= 1;
  Train();
  const StepRecord changed = Save(2);
  EXPECT_GT(written_, 2 * kBaseBytes);
  Train();
  const StepRecord same = Save(3);
  EXPECT_LT(written_, 2 * kBaseBytes);
  ExpectDurable(changed);
  ExpectDurable(same);
  const auto step = *store_->Load(same);
  EXPECT_EQ(ParentPath(step->model.blobs[1].path),
            ParentPath((*store_->Load(changed))->model.blobs[0].path));
}

// With a policy that keeps one step, the first one is gone when the third one comes.
TEST_F(KeptTensorsTest, SavesThatOverlapNeedNothingThatAPolicyRemoves) {
  const StepRecord first = Save(1);
  base()[0] ^= 1;
  Train();
  const ReceivedStep under_way = HandOver(2);  // the base, too
  base()[0] ^= 1;                              // as it was
  const ReceivedStep next = HandOver(3);
  EXPECT_GT(written_, 2 * kBaseBytes);
  base()[0] ^= 1;
  const StepRecord second = Persist(under_way);
  base()[0] ^= 1;
  kept_.Durable(2, PlaceOf(under_way));
  ASSERT_TRUE(store_->Remove(first));
  Collect();
  const StepRecord third = Persist(next);
  truth_[3] = memory_;
  ExpectDurable(third);
}

TEST_F(KeptTensorsTest, ASaveWhoseFilesNobodyKnowsEndsWhatIsKept) {
  Save(1);
  Train();
  const ReceivedStep received = HandOver(2);
  EXPECT_LT(written_, 2 * kBaseBytes);
  Persist(received);
  kept_.Durable(2, "");
  Train();
  ExpectDurable(Save(3));
  EXPECT_GT(written_, 2 * kBaseBytes);
}

TEST_F(KeptTensorsTest, ARemovedStepsFileStaysAsLongAsOthersNeedIt) {
  const StepRecord first = Save(1);
  Train();
  const StepRecord second = Save(2);
  ASSERT_TRUE(store_->Remove(first));
  Collect();
  ExpectDurable(second);
  Train();
  const StepRecord third = Save(3);  // the second step is what proves the first one's file
  EXPECT_LT(written_, 2 * kBaseBytes);
  ASSERT_TRUE(store_->Remove(second));
  Collect();
  ExpectDurable(third);
  EXPECT_EQ(FilesThere(), 2u);
  ASSERT_TRUE(store_->Remove(third));
  Collect();
  EXPECT_EQ(FilesThere(), 0u);
}

TEST_F(KeptTensorsTest, AFileThatIsBeingPointedIntoIsNotCollected) {
  const StepRecord first = Save(1);
  Train();
  const ReceivedStep received = HandOver(2);
  auto step = InMemory(received);
  ASSERT_TRUE(step) << step.error().message;
  const auto held = *catalogue_.Hold(*std::move(step));
  ASSERT_TRUE(store_->Remove(first));
  Collect();
  const auto stored = catalogue_.Persist(held);
  ASSERT_TRUE(stored) << stored.error().message;
  truth_[2] = memory_;
  ExpectDurable(*stored);
}

TEST_F(KeptTensorsTest, AfterARemovalTheStepIsRefusedAndTheNextOneIsWhole) {
  const StepRecord first = Save(1);
  Train();
  const ReceivedStep received = HandOver(2);
  ASSERT_TRUE(store_->Remove(first));
  auto step = InMemory(received);  // its file is there still, and nothing proves it
  ASSERT_FALSE(step);
  EXPECT_EQ(step.error().code, ErrorCode::kInvalid);
  EXPECT_THAT(step.error().message, HasSubstr("which no step of run 'run' has"));
  Collect();
  step = InMemory(received);
  ASSERT_FALSE(step);
  EXPECT_THAT(step.error().message, HasSubstr("'base' is kept in snapshots/"));
  kept_.Refused(2);
  ExpectDurable(Save(3));
  EXPECT_GT(written_, 2 * kBaseBytes);
}

TEST_F(KeptTensorsTest, AnotherRunsFilesAreNotPointedInto) {
  Save(1);
  Train();
  ReceivedStep received = HandOver(2);
  received.name.run = "other";
  const auto step = InMemory(received);
  ASSERT_FALSE(step);
  EXPECT_THAT(step.error().message, HasSubstr("which no step of run 'other' has"));
}

// The header's JSON, changed.
std::string Edited(std::string file, std::string_view from, std::string_view to) {
  EXPECT_EQ(from.size(), to.size());
  const size_t at = file.find(from);
  EXPECT_NE(at, file.npos) << from;
  return file.replace(at, from.size(), to);
}

TEST_F(KeptTensorsTest, WhatIsNotThereIsRefusedByName) {
  Save(1);
  Train();
  const ReceivedStep received = HandOver(2);
  const auto& span = received.files[0].rope[0];
  const std::string file(reinterpret_cast<const char*>(span.data()), span.size());
  const auto refusal = [&](std::string_view from, std::string_view to) {
    const auto step = InMemory(Received(2, std::make_shared<std::string>(Edited(file, from, to))));
    return step ? "none" : step.error().message;
  };
  EXPECT_THAT(refusal("snapshots/", "../../etc/"), HasSubstr("is not where a save's files lie"));
  EXPECT_THAT(refusal("\\\"shape\\\":[40000]}", "\\\"shape\\\":[39999]}"),
              HasSubstr("does not have such a tensor"));
  EXPECT_THAT(refusal("\\\"version\\\":3", "\\\"version\\\":2"), HasSubstr("only version 3"));
}

TEST(TensorDigestsTest, TensorsLieAcrossPieces) {
  std::string file(1000, '\0');
  for (size_t i = 0; i < file.size(); ++i) file[i] = static_cast<char>(i * 7);
  const auto bytes = std::as_bytes(std::span(file));
  for (const size_t piece : std::vector<size_t>{1, 7, 100, 999, 1000}) {
    TensorDigests digests;
    const std::vector<std::pair<uint64_t, uint64_t>> ranges = {{10, 300}, {300, 301}, {400, 1000}};
    for (const auto& [begin, end] : ranges) {
      digests.Add({{"t", DType::kU8, {end - begin}, begin, end}, "", begin != 300});
    }
    for (size_t at = 0; at < file.size(); at += piece) {
      digests.Take(at, bytes.subspan(at, std::min(piece, file.size() - at)));
    }
    for (const auto& one : digests.all()) {
      const uint64_t begin = one.entry.begin;
      ASSERT_EQ(one.digest.has_value(), begin != 300);
      if (!one.digest) continue;
      EXPECT_EQ(*one.digest, DigestOf(bytes.subspan(begin, one.entry.end - begin)));
    }
  }
}

}  // namespace
}  // namespace ckptfs
