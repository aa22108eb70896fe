// SPDX-License-Identifier: Apache-2.0
//
// Copies read the memory of the moment of the save, for as long as they need it, and never memory
// that was freed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using testing_support::kLong;
using testing_support::RankMemory;
using testing_support::ReceiverTest;

struct CopiesTest : ReceiverTest {};

#if defined(__SANITIZE_THREAD__)
// So that the cases of receiver_test and schedule_test show more than what bytes happen to say.
class RacingCopiesTest : public ReceiverTest {
 protected:
  // Nothing here orders the update and the copy: relaxed, and no lock is taken between them.
  void UpdateBesideACopy() {
    Start();
    std::atomic<int> waits{0};
    std::atomic<bool> updated{false};
    const auto writer = Writer(0, 1, [&, made = 0]() mutable {
      const bool lazy = made++ == 1;
      return std::make_unique<LateCopier>(0, [&waits, &updated, lazy] {
        // The first chunk has the header alone.
        if (!lazy || waits.fetch_add(1, std::memory_order_relaxed) == 0) return;
        while (!updated.load(std::memory_order_relaxed)) std::this_thread::yield();
      });
    });
    RankMemory memory({5000});
    if (!writer->Save(memory.Save(1, 0))) std::exit(1);
    while (waits.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
    memory.Fill(0xee);
    updated.store(true, std::memory_order_relaxed);
    (void)writer->WaitDurable(1, kLong);
    std::exit(0);
  }
};

TEST_F(RacingCopiesTest, AnUpdateThatDoesNotWaitIsReported) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(UpdateBesideACopy(), testing::ExitedWithCode(66), "data race.*LateCopier::Wait");
}
#endif

// The host's, as soon as a gate is open.
class GatedCopier final : public Copier {
 public:
  explicit GatedCopier(std::mutex& gate) : gate_(gate) {}
  Status Enqueue(std::span<const MemoryCopy> copies, Trainer trainer) override {
    if (trainer == Trainer::kWaits) return host_.Enqueue(copies, trainer);
    const std::lock_guard wait(gate_);
    return host_.Enqueue(copies, trainer);
  }
  Status Wait() override { return {}; }
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

 private:
  std::mutex& gate_;
  HostCopier host_;
};

// Through an alias of its memory, say.
TEST_F(CopiesTest, AWriteThatNobodyCountedShows) {
  Start();
  std::mutex gate;
  const auto writer = Writer(0, 1, [&] { return std::make_unique<GatedCopier>(gate); });
  RankMemory memory({9000});
  for (uint64_t step = 0; step < 4; ++step) {
    memory.Fill(1);
    gate.lock();
    ASSERT_TRUE(writer->Save(memory.Save(step, 0)));
    if (step % 2 == 1) memory.Fill(2);
    gate.unlock();
    EXPECT_EQ(writer->WaitDurable(step, kLong), step % 2 == 0);
  }
  EXPECT_THAT(writer->status().last_drop,
              testing::HasSubstr("p0.of0 was written before the update"));
  EXPECT_EQ(kept().size(), 2u);
}

// The caller lets go of the capture, and free memory is given to others.
TEST_F(CopiesTest, MemoryIsThereUntilItIsCopiedAndNoLonger) {
  Start();
  std::mutex gate;
  const auto writer = Writer(0, 1, [&] { return std::make_unique<GatedCopier>(gate); });
  auto memory = std::make_unique<RankMemory>(std::vector<uint64_t>{9000, 10, 9000});
  memory->Fill(1);
  const std::string truth = memory->Truth(1, 0, 1);
  const std::weak_ptr<const void> owned = memory->Save(1, 0).owner;
  gate.lock();
  ASSERT_TRUE(writer->Save(memory->Save(1, 0)));
  memory.reset();
  const std::vector<std::string> others(20, std::string(36'000, '\x77'));
  gate.unlock();
  EXPECT_TRUE(writer->WaitDurable(1, kLong)) << writer->status().last_drop;
  ASSERT_EQ(kept().size(), 1u);
  EXPECT_TRUE(kept()[0].files[0] == truth);
  for (int i = 0; i < 1000 && !owned.expired(); ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(owned.expired());
}

// share_memory(), resize_(0), a page that an allocator has closed: the trainer goes on.
struct GoneTest : ReceiverTest, testing::WithParamInterface<std::pair<bool, bool>> {};
TEST_P(GoneTest, MemoryThatIsGivenBackBeforeItWasCopied) {
  const auto [closed, waits] = GetParam();
  Start();
  std::mutex gate;
  const auto writer = Writer(0, 1, [&] { return std::make_unique<GatedCopier>(gate); });
  constexpr size_t kBytes = 64 << 10;
  // Far below where others are mapped, who would take its place, and where a sanitizer has memory.
  void* const place = reinterpret_cast<void*>(uintptr_t{0x5510} << 32);
  void* const memory =
      mmap(place, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_EQ(memory, place);
  Capture capture;
  capture.step = 1;
  CapturedTensor tensor;
  tensor.parameter = "w";
  tensor.kind = "weight";
  tensor.shape = {kBytes / 4};
  tensor.from = static_cast<const std::byte*>(memory);
  tensor.lazy = true;
  capture.tensors.push_back(tensor);
  gate.lock();
  ASSERT_TRUE(writer->Save(std::move(capture))) << writer->status().last_drop;
  std::latch gone(1);
  std::thread update;  // before: its own memory shall not take that place
  if (waits) {
    update = std::thread([&] {
      gone.wait();
      writer->WaitBeforeUpdate();
    });
  }
  if (closed) mprotect(memory, kBytes, PROT_NONE);
  if (!closed) munmap(memory, kBytes);
  gone.count_down();
  if (waits) std::this_thread::sleep_for(milliseconds(50));
  gate.unlock();
  if (update.joinable()) update.join();
  EXPECT_FALSE(writer->WaitDurable(1, kLong));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("freed before the update"));
  RankMemory other({100});
  ASSERT_TRUE(writer->Save(other.Save(2, 0)));
  EXPECT_TRUE(writer->WaitDurable(2, kLong));
  if (closed) munmap(memory, kBytes);
}

INSTANTIATE_TEST_SUITE_P(Ways, GoneTest,
                         testing::Values(std::pair(false, false), std::pair(true, false),
                                         std::pair(false, true)));

}  // namespace
}  // namespace ckptfs
