// SPDX-License-Identifier: Apache-2.0
//
// A job whose ranks, copies and disk come past each other in an order that a seed decides, with
// slow and failing copies, full and tiny arenas, failing disks, ranks that drop, cancel or leave:
// whatever happens, a step is the truth or nothing.
//
// CKPTFS_SEED=N runs that one, CKPTFS_LONG=1 five thousand.
#include "tests/support/schedule.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using testing_support::kLong;
using testing_support::kSmallChunk;
using testing_support::RankMemory;
using testing_support::ReceiverTest;
using testing_support::Schedule;

constexpr uint64_t kSteps = 4;
constexpr uint32_t kDisk = 1000;
constexpr uint32_t kMostRanks = 3;
// For ranks that never come: others may wait for room until then.
constexpr std::chrono::milliseconds kPatience{30};

uint32_t TrainerOf(uint32_t rank) { return 2 * rank; }
uint32_t CopierOf(uint32_t rank) { return 2 * rank + 1; }

// Copies late, when it is its turn.
class ScheduledCopier final : public Copier {
 public:
  ScheduledCopier(Schedule& schedule, uint32_t actor, uint64_t fail_at)
      : schedule_(schedule), actor_(actor), copier_(fail_at) {}
  Result<DeviceMoment> TakeMoment(std::span<const MemoryPiece>, std::span<const MemoryPiece>,
                                  std::span<const DeviceStream>) override {
    return Fail(ErrorCode::kUnsupported, "no device");
  }
  Result<std::shared_ptr<const CopyMark>> Mark(std::span<const DeviceStream>) override {
    return Fail(ErrorCode::kUnsupported, "no device");
  }
  Status Follow(std::span<const DeviceStream>) override { return {}; }
  Result<std::shared_ptr<const void>> Pin(std::span<std::byte>, int) override {
    return Fail(ErrorCode::kUnsupported, "no device");
  }
  Status Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) override {
    return Told(copier_.Enqueue(copies, trainer));
  }
  Status Wait() override {
    schedule_.Point(actor_);
    return Told(copier_.Wait());
  }

 private:
  Status Told(Status done) {
    if (!done) schedule_.Leave(actor_);  // the save is over
    return done;
  }
  Schedule& schedule_;
  const uint32_t actor_;
  LateCopier copier_;
};

// One rank as the seed makes it.
struct Rank {
  Rank(unsigned seed, uint32_t number) : random(seed * 100 + number) {
    std::vector<uint64_t> sizes(1 + random() % 5);
    for (uint64_t& size : sizes) size = random() % 6000;
    memory.emplace(sizes);
    fail_at = random() % 4 == 0 ? 1 + random() % 60 : 0;
    leaves_at = random() % 8 == 0 ? random() % kSteps : kSteps;
  }
  bool Once(unsigned in) { return random() % in == 0; }
  // The update of an optimizer.
  void Update(unsigned char seed) {
    const bool beside = cancelled || gave_up;
    if (beside) memory->FillBesideACancelledCopy(seed);
    if (!beside) memory->Fill(seed);
  }

  std::mt19937 random;
  std::optional<RankMemory> memory;
  uint64_t fail_at = 0;
  uint64_t leaves_at = kSteps;
  bool cancelled = false;  // the newest save: its copy may still go on
  bool gave_up =
      false;  // an update that waited as long as it may, of a machine that is busy: likewise
};

class ScheduleTest : public ReceiverTest {
 protected:
  // Every rank's file of a step that nothing went wrong with.
  using Truths = std::map<std::pair<uint64_t, uint32_t>, std::string>;

  Status Keep(const SaveBytes& save) override {
    Schedule& schedule = *schedule_;
    schedule.Enter(kDisk);
    schedule.Point(kDisk);
    const bool fails = (seed_ * 31 + save.part().step) % 8 == 0;
    const Status kept = fails ? Fail(ErrorCode::kIo, "disk full") : ReceiverTest::Keep(save);
    schedule.Leave(kDisk);
    return kept;
  }

  void Run(unsigned seed) {
    seed_ = seed;
    schedule_ = std::make_unique<Schedule>(seed);
    std::mt19937 random(seed);
    const uint32_t world = 1 + random() % kMostRanks;
    const uint64_t memory = (random() % 4 == 0 ? 24 : 512) * kSmallChunk;
    Start(kPatience, 64, memory);
    std::vector<std::thread> trainers;
    // All are on the move before the first is.
    for (uint32_t rank = 0; rank < world; ++rank) schedule_->Enter(TrainerOf(rank));
    for (uint32_t rank = 0; rank < world; ++rank) {
      trainers.emplace_back([this, seed, rank, world] { Train(seed, rank, world); });
    }
    for (std::thread& trainer : trainers) trainer.join();
    receiver_.reset();  // it keeps whole parts
    for (const Kept& one : kept()) Check(one, world);
    all_kept_ += kept_.size();
    kept_.clear();
    truths_.clear();
  }

  std::unique_ptr<SnapshotWriter> WriterOf(Rank& one, unsigned seed, uint32_t rank,
                                           uint32_t world) {
    WriterOptions options{directory_.path(),
                          "run",
                          StrCat("job", seed),
                          rank,
                          world,
                          1 + static_cast<uint32_t>(one.random() % 3),
                          kLong,
                          {}};
    options.wait_for_room = one.Once(3);
    // The first copies what cannot wait, in the trainer's thread.
    options.make_copier = [this, rank, made = 0, fail_at = one.fail_at]() mutable {
      return std::make_unique<ScheduledCopier>(
          *schedule_, made++ == 0 ? TrainerOf(rank) : CopierOf(rank), fail_at);
    };
    return std::make_unique<SnapshotWriter>(std::move(options));
  }

  void Train(unsigned seed, uint32_t rank, uint32_t world) {
    Schedule& schedule = *schedule_;
    Rank one(seed, rank);
    auto writer = WriterOf(one, seed, rank, world);
    for (uint64_t step = 0; step < one.leaves_at; ++step) {
      schedule.Point(TrainerOf(rank));
      one.Update(static_cast<unsigned char>(one.random()));
      if (one.Once(16)) {
        writer->Drop(step, "nothing to save");
        continue;
      }
      Save(one, *writer, step, rank, world);
      schedule.Point(TrainerOf(rank));
      one.memory->ChangeEager();
      if (one.Once(16) && writer->Cancel(step)) {
        one.cancelled = true;
        Forget(step, rank);
        schedule.Leave(CopierOf(rank));
      }
      schedule.Point(TrainerOf(rank));
      const Schedule::Waiting waiting(schedule, TrainerOf(rank));
      if (!writer->WaitBeforeUpdate(kLong, false)) {
        one.gave_up = true;
        writer->WaitBeforeUpdate(std::chrono::milliseconds(0));
      }
      one.Update(0x77);
      if (one.Once(2)) (void)writer->WaitDurable(step, std::chrono::milliseconds(one.random() % 3));
    }
    schedule.Leave(TrainerOf(rank));
    writer.reset();
  }

  void Save(Rank& one, SnapshotWriter& writer, uint64_t step, uint32_t rank, uint32_t world) {
    Schedule& schedule = *schedule_;
    const bool written = one.Once(16);  // by somebody who was not to
    if (!written) {
      const std::lock_guard lock(mutex_);
      truths_[{step, rank}] = one.memory->Truth(step, rank, world);
    }
    Capture capture = one.memory->Save(step, rank);
    capture.changed = [&schedule, rank, written](bool all) -> std::string {
      if (!all) {  // the save has room, and the copier will come by
        schedule.Enter(CopierOf(rank));
        return "";
      }
      schedule.Point(CopierOf(rank));
      schedule.Leave(CopierOf(rank));
      return written ? "p0" : "";
    };
    const Schedule::Waiting waiting(schedule, TrainerOf(rank));  // for room
    if (writer.Save(std::move(capture))) {
      one.cancelled = false;  // a wait for this one is a wait for those before it
      return;
    }
    schedule.Leave(CopierOf(rank));
    Forget(step, rank);
  }

  void Forget(uint64_t step, uint32_t rank) {
    const std::lock_guard lock(mutex_);
    truths_.erase({step, rank});
  }

  void Check(const Kept& one, uint32_t world) {
    ASSERT_EQ(one.files.size(), world);
    for (uint32_t rank = 0; rank < world; ++rank) {
      const auto truth = truths_.find({one.step, rank});
      ASSERT_NE(truth, truths_.end()) << "step " << one.step << " is not whole: rank " << rank;
      EXPECT_TRUE(one.files[rank] == truth->second) << "step " << one.step << " rank " << rank;
    }
  }

  unsigned seed_ = 0;
  std::unique_ptr<Schedule> schedule_;
  Truths truths_;  // under mutex_
  size_t all_kept_ = 0;
};

TEST_F(ScheduleTest, WhateverHappensAStepIsTheTruthOrNothing) {
  const char* chosen = std::getenv("CKPTFS_SEED");
  const unsigned first = chosen != nullptr ? static_cast<unsigned>(std::atoi(chosen)) : 0;
  const unsigned count = chosen != nullptr                       ? 1
                         : std::getenv("CKPTFS_LONG") != nullptr ? 5'000
                                                                 : 100;
  for (unsigned seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE(StrCat("CKPTFS_SEED=", seed));
    Run(seed);
    if (HasFailure()) break;
  }
  if (chosen == nullptr) {
    EXPECT_GT(all_kept_, count);
  }
}

}  // namespace
}  // namespace ckptfs
