// SPDX-License-Identifier: Apache-2.0
//
// A step of several daemons whose files point into those of an earlier step: once it is decided it
// becomes a step, whatever else is removed and collected meanwhile.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "core/io/blob_directories.h"
#include "core/io/file_storage.h"
#include "core/store/collect.h"
#include "snapshot/trainer/kept_tensors.h"
#include "tests/snapshot/nodes.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_directory.h"

namespace ckptfs {
namespace {

using State = AttemptNews::State;
using testing_support::AttemptOf;
using testing_support::Node;
using testing_support::RankFileOf;

constexpr uint64_t kKeptElements = 40'000;

// Rank 0 of two: it trains a head on a base.
class KeepingRank {
 public:
  // The rank's file at a step.
  std::string HandOver(uint64_t step) {
    head_.assign(4 * kKeptElements, static_cast<char>(step));
    Capture capture;
    capture.step = step;
    for (const auto& [name, memory] : {std::pair("base", &base_), std::pair("head", &head_)}) {
      CapturedTensor tensor;
      tensor.parameter = name;
      tensor.kind = "weight";
      tensor.shape = {kKeptElements};
      tensor.from = reinterpret_cast<const std::byte*>(memory->data());
      capture.tensors.push_back(std::move(tensor));
      capture.parameters.push_back({name, "trainable"});
    }
    auto file = CaptureFile::Make(std::move(capture), 0, 2, &kept_);
    EXPECT_TRUE(file) << file.error().message;
    std::string bytes(file->bytes(), '\0');
    for (const CopyRun& run : file->Runs(0, file->bytes(), false)) {
      std::memcpy(bytes.data() + run.at, run.from, run.bytes);
    }
    auto digests = std::make_shared<TensorDigests>(file->TakeDigests());
    digests->Take(0, std::as_bytes(std::span(bytes)));
    kept_.Begin(step, digests, file->kept(), file->bytes());
    return bytes;
  }
  void Durable(uint64_t step, const AttemptName& name) {
    kept_.Durable(step, PreparedPart{name, step, 0, 0, {}}.Directory());
  }
  const std::string& base() const { return base_; }

 private:
  std::string base_ = std::string(4 * kKeptElements, 'b');
  std::string head_;
  KeptTensors kept_;
};

class KeptCommitTest : public testing::Test {
 protected:
  Node Start(const std::shared_ptr<Storage>& storage) const {
    return Node(storage, directory_->path(), std::chrono::milliseconds(1));
  }
  std::shared_ptr<Storage> Disk() const {
    return std::shared_ptr<Storage>(*FileStorage::Open(directory_->path(), true));
  }
  Status Prepare(const Node& node, uint64_t step, uint32_t rank, const std::string& file) const {
    PreparedPart part{AttemptOf(step, 2), step, 2, 0, {{rank, file.size(), ChunkDigestsOf(file)}}};
    MemoryRoot bytes("handed over");
    auto text = std::make_shared<std::string>(file);
    CKPT_RETURN_IF_ERROR(bytes.Add(part.PathOf(rank), {std::as_bytes(std::span(*text))}, text, {}));
    return node.commit->Prepare(std::move(part), bytes);
  }
  // All that is collectable goes, also after a while.
  void Collect(const Node& node) const {
    for (int i = 0; i < 3; ++i) {
      const auto report = node.store->Collect({});
      ASSERT_TRUE(report) << report.error().message;
      EXPECT_TRUE(report->notes.empty());
    }
  }
  bool IsDecided() const { return *HasFile(*Disk(), OutcomeName(AttemptOf(2, 2))); }

  std::optional<TemporaryDirectory> directory_;
};

// The leader stops at each of its changes, with its effect and without.
TEST_F(KeptCommitTest, WhatADecidedStepPointsIntoStaysUntilItIsThere) {
  size_t decided = 0;
  bool went_through = false;
  for (uint64_t at = 1; !went_through; ++at) {
    ASSERT_LT(at, 100u);
    for (const bool with_effect : {false, true}) {
      SCOPED_TRACE(at);
      directory_.emplace();
      KeepingRank rank;
      const Node other = Start(Disk());
      ASSERT_TRUE(other.Join({1}, 2));  // it works until the end
      std::string file;
      {
        const auto faulty = std::make_shared<FaultyStorage>(Disk());
        const Node leader = Start(faulty);
        ASSERT_TRUE(Prepare(leader, 1, 0, rank.HandOver(1)));
        ASSERT_TRUE(Prepare(other, 1, 1, RankFileOf(1, 1, 2)));
        ASSERT_EQ(leader.commit->Look(AttemptOf(1, 2), true)->state, State::kDurable);
        ASSERT_EQ(other.commit->Look(AttemptOf(1, 2), true)->state, State::kDurable);
        rank.Durable(1, AttemptOf(1, 2));
        file = rank.HandOver(2);
        ASSERT_LT(file.size(), 2 * rank.base().size()) << "the base is not written again";
        ASSERT_TRUE(Prepare(leader, 2, 0, file));
        ASSERT_TRUE(Prepare(other, 2, 1, RankFileOf(2, 1, 2)));
        faulty->StopAt(at, with_effect);
        const auto news = leader.commit->Look(AttemptOf(2, 2), true);
        went_through = news && news->state == State::kDurable && !faulty->stopped();
      }
      if (IsDecided() && !went_through) {
        ++decided;
        const auto first = other.store->Resolve("run", "1");
        ASSERT_TRUE(first);
        ASSERT_TRUE(other.store->Remove(*first));
        Collect(other);
        const auto news = other.commit->Look(AttemptOf(2, 2), true);
        ASSERT_TRUE(news) << news.error().message;
        EXPECT_EQ(news->state, State::kDurable);
      }
      ASSERT_TRUE(other.store->Refresh());
      if (const auto record = other.store->Resolve("run", "2")) {
        Collect(other);
        const auto step = other.store->Load(*record);
        ASSERT_TRUE(step) << step.error().message;
        for (const Blob& blob : (*step)->model.blobs) {
          const auto bytes = ReadWhole(*Disk(), StrCat("blobs/", blob.path), 1 << 24);
          ASSERT_TRUE(bytes) << bytes.error().message;
          EXPECT_TRUE(HasChunks(blob, ChunkDigestsOf(*bytes)));
        }
        EXPECT_EQ((*step)->model.blobs.size(), 3u);
      } else {
        EXPECT_FALSE(went_through);
      }
    }
  }
  EXPECT_GT(decided, 4u);
}

}  // namespace
}  // namespace ckptfs
