// SPDX-License-Identifier: Apache-2.0
//
// Saves of devices whose updates wait on the device, on a driver that is not one: whatever comes
// late, and whoever does not keep to the order, a step is the truth or nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "tests/snapshot/on_fake_cuda.h"

namespace ckptfs {
namespace {

using testing_support::FakeCudaTest;
using testing_support::kLong;
using testing_support::RankMemory;

// A training job whose tensors lie on device 1 and are updated there, far behind the host.
class DeviceSavesTest : public FakeCudaTest {
 protected:
  using Bytes = std::vector<std::span<char>>;

  std::unique_ptr<SnapshotWriter> WriterOf(WriterOptions options = {}) {
    options.store = directory_.path();
    options.run = "run";
    options.job = "job";
    options.update_limit = kLong;
    if (!options.make_copier) options.make_copier = [] { return Open(); };
    return std::make_unique<SnapshotWriter>(std::move(options));
  }
  // A save of what the device has by then: every second tensor is late.
  static Capture CaptureOf(const RankMemory& memory, uint64_t step) {
    Capture capture = memory.Save(step, 0);
    for (CapturedTensor& tensor : capture.tensors) tensor.device = 1;
    capture.streams = {Training()};
    return capture;
  }
  static Bytes BytesOf(const RankMemory& memory) {
    Bytes bytes;
    for (const CapturedTensor& tensor : memory.Save(0, 0).tensors) {
      bytes.emplace_back(reinterpret_cast<char*>(const_cast<std::byte*>(tensor.from)),
                         4 * tensor.shape[0]);
    }
    return bytes;
  }
  static void Raise(const Bytes& all) {
    for (const auto bytes : all) {
      for (char& byte : bytes) ++byte;
    }
  }
  // An update of the device's memory, and the same of the host's twin of it, at once.
  static void Update(const RankMemory& memory, const RankMemory& twin,
                     const DeviceStream& stream = Training()) {
    Raise(BytesOf(twin));
    Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
        reinterpret_cast<void*>(stream.handle),
        [](void* argument) {
          const std::unique_ptr<Bytes> bytes(static_cast<Bytes*>(argument));
          Raise(*bytes);
        },
        new Bytes(BytesOf(memory)));
  }
  // When the arena is page-locked.
  static bool Hold(SnapshotWriter& writer, std::vector<DeviceStream> streams = {Training()}) {
    const auto end = std::chrono::steady_clock::now() + kLong;
    for (auto status = writer.status(); status.pinned_bytes < status.arena_bytes;) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      status = writer.status();
    }
    return writer.HoldUpdate(streams);
  }
  std::optional<std::string> KeptOf(uint64_t step) {
    for (const Kept& one : kept()) {
      if (one.step == step) return one.files[0];
    }
    return std::nullopt;
  }
};

TEST_F(DeviceSavesTest, PiecesAreTakenInTheirMoment) {
  const auto copier = Open();
  std::string memory(70'000, 'a'), taken(memory.size(), '?');
  const auto* const from = reinterpret_cast<const std::byte*>(memory.data());
  const std::vector<MemoryPiece> pieces{{from, 69'993, 1}, {from + 69'993, 7, 1}};
  const std::vector streams{DeviceStream{1, reinterpret_cast<uint64_t>(Stream(1))}, Training()};
  Gate(false);
  FakeCudaTest::Update(memory);
  const auto moment = copier->TakeMoment({}, pieces, streams);
  ASSERT_TRUE(moment) << moment.error().message;
  FakeCudaTest::Update(memory);
  ASSERT_EQ(moment->taken.size(), 2u);
  EXPECT_EQ(moment->taken[0] + 69'993, moment->taken[1]);
  ASSERT_TRUE(copier->Follow(streams));
  const MemoryCopy copy{moment->taken[0], reinterpret_cast<std::byte*>(taken.data()), 70'000, 1};
  ASSERT_TRUE(copier->Enqueue({&copy, 1}, Trainer::kGoesOn));
  Gate(true);
  ASSERT_TRUE(copier->Wait());
  Synchronize();
  EXPECT_EQ(memory, std::string(70'000, 'c'));
  EXPECT_EQ(taken, std::string(70'000, 'b'));
}

// The host never waits for the device: neither in the saves nor before the updates.
TEST_F(DeviceSavesTest, UpdatesComeAfterCopiesAndTheHostDoesNotWait) {
  Start();
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 300, 70'000, 3}), twin({30'000, 300, 70'000, 3});
  std::map<uint64_t, std::string> truths;
  for (uint64_t step = 0; step < 12; ++step) {
    Gate(false);
    Update(memory, twin);
    truths[step] = twin.Truth(step, 0, 1);
    const uint64_t before = Waits();
    ASSERT_TRUE(writer->Save(CaptureOf(memory, step))) << writer->status().last_drop;
    ASSERT_TRUE(Hold(*writer));
    Update(memory, twin);
    EXPECT_LE(Waits() - before, 1u);  // of the copying thread
    Gate(true);
    EXPECT_TRUE(writer->WaitDurable(step, kLong)) << writer->status().last_drop;
    EXPECT_TRUE(KeptOf(step) == truths[step]) << step;
  }
  EXPECT_EQ(writer->status().unproved, 0u);
  Synchronize();
}

// Saves every step without ever waiting for anything; those that find no room are dropped.
TEST_F(DeviceSavesTest, ATrainingThatRunsFarAheadSavesTheTruth) {
  Start();
  WriterOptions options;
  options.slots = 3;
  const auto writer = WriterOf(std::move(options));
  const RankMemory memory({20'000, 300, 900, 3}), twin({20'000, 300, 900, 3});
  std::map<uint64_t, std::string> truths;
  std::mt19937 random(7);
  for (uint64_t step = 0; step < 60; ++step) {
    truths[step] = twin.Truth(step, 0, 1);
    if (random() % 4 == 0) Gate(random() % 2 == 0);
    (void)writer->Save(CaptureOf(memory, step));
    if (random() % 8 == 0) (void)writer->Cancel(step);
    if (random() % 8 == 0) continue;
    ASSERT_TRUE(Hold(*writer));
    Update(memory, twin);
  }
  Gate(true);
  writer->Close();
  receiver_.reset();
  EXPECT_GT(kept_.size(), 3u);
  for (const Kept& one : kept_) EXPECT_TRUE(one.files[0] == truths[one.step]) << one.step;
  Synchronize();
}

// An update on a stream that was not told of is not held up: the digests, which were made when the
// save was called, show it.
TEST_F(DeviceSavesTest, AnUpdateOnAnotherStreamDropsTheStepByName) {
  Start();
  const auto writer = WriterOf();
  const RankMemory memory({30'000}), twin({30'000});
  const DeviceStream other{1, reinterpret_cast<uint64_t>(Stream(1))};
  size_t dropped = 0;
  for (uint64_t step = 0; step < 20; ++step) {
    const std::string truth = twin.Truth(step, 0, 1);
    ASSERT_TRUE(writer->Save(CaptureOf(memory, step))) << writer->status().last_drop;
    Synchronize();  // the digests are there
    Update(memory, twin, other);
    ASSERT_TRUE(Hold(*writer, {other}));
    if (writer->WaitDurable(step, kLong)) {
      EXPECT_TRUE(KeptOf(step) == truth);
    } else {
      ++dropped;
      EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("p0.of0 was written before the"));
    }
    std::promise<void> done;
    Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
        reinterpret_cast<void*>(other.handle),
        [](void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); }, &done);
    done.get_future().wait();
  }
  EXPECT_EQ(writer->status().dropped, dropped);
}

// Each of several streams waits for the copies, and so does who asks on the host.
TEST_F(DeviceSavesTest, EveryStreamOfUpdatesWaits) {
  Start();
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 300}), twin({30'000, 300});
  const DeviceStream other{1, reinterpret_cast<uint64_t>(Stream(1))};
  for (uint64_t step = 0; step < 20; ++step) {
    const std::string truth = twin.Truth(step, 0, 1);
    ASSERT_TRUE(writer->Save(CaptureOf(memory, step))) << writer->status().last_drop;
    ASSERT_TRUE(Hold(*writer));
    Gate(step % 2 == 0);
    const bool host = step % 3 == 0;
    if (host) Gate(true);
    if (host) writer->WaitBeforeUpdate();
    if (!host) {
      ASSERT_TRUE(Hold(*writer, {other}));
    }
    Update(memory, twin, other);
    Gate(true);
    EXPECT_TRUE(writer->WaitDurable(step, kLong)) << writer->status().last_drop;
    EXPECT_TRUE(KeptOf(step) == truth) << step;
    std::promise<void> done;
    Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
        reinterpret_cast<void*>(other.handle),
        [](void* promise) { static_cast<std::promise<void>*>(promise)->set_value(); }, &done);
    done.get_future().wait();
  }
}

TEST_F(DeviceSavesTest, WhereADeviceCannotWaitTheHostDoes) {
  Start();
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 3});
  ASSERT_TRUE(writer->Save(CaptureOf(memory, 0)));
  EXPECT_TRUE(Hold(*writer));
  EXPECT_TRUE(writer->WaitDurable(0, kLong)) << writer->status().last_drop;
  EXPECT_TRUE(Hold(*writer));  // there is nothing to wait for
  // With memory of the host, too, torch's counters are asked when all is copied.
  Capture of_host = memory.Save(1, 0);
  of_host.tensors.front().device = kHost;
  of_host.streams = {Training()};
  std::atomic<bool> asked{false};
  of_host.changed = [&](bool all) -> std::string {
    asked = asked || all;
    return "";
  };
  ASSERT_TRUE(writer->Save(std::move(of_host)));
  writer->WaitBeforeUpdate();
  EXPECT_TRUE(writer->WaitDurable(1, kLong));
  EXPECT_TRUE(asked);
  Gate(false);
  ASSERT_TRUE(writer->Save(CaptureOf(memory, 2)));
  Capturing(true);
  EXPECT_FALSE(Hold(*writer));
  Capturing(false);
  EXPECT_FALSE(Hold(*writer, {{2, Training(2).handle}}));  // nobody knows of device 1
  Gate(true);
  writer->WaitBeforeUpdate();
  EXPECT_TRUE(writer->WaitDurable(2, kLong));
}

TEST_F(DeviceSavesTest, UnprovedMemoryIsWaitedForByTheHost) {
  Start();
  RefuseModules(true);
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 3});
  Gate(false);
  auto saving = std::async([&] { return writer->Save(CaptureOf(memory, 0)); });
  Gate(true);
  ASSERT_TRUE(saving.get());
  writer->WaitBeforeUpdate();
  EXPECT_TRUE(writer->WaitDurable(0, kLong));
  EXPECT_GT(writer->status().unproved_bytes, 0u);
}

// The arena's room of a save that is dropped is not given to the next one while a device may still
// copy into it.
TEST_F(DeviceSavesTest, RoomOfADroppedSaveIsFreeWhenItsCopiesAreOver) {
  Start();
  WriterOptions options;
  options.slots = 1;
  const auto writer = WriterOf(std::move(options));
  const RankMemory memory({30'000, 3}), twin({30'000, 3});
  Gate(false);
  ASSERT_TRUE(writer->Save(CaptureOf(memory, 0)));
  ASSERT_TRUE(Hold(*writer));
  Update(memory, twin);
  ASSERT_TRUE(writer->Cancel(0));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(writer->Save(CaptureOf(memory, 1)));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("the arena is full"));
  Gate(true);
  Synchronize();
  const std::string truth = twin.Truth(2, 0, 1);
  for (int i = 0; i < 1000 && !writer->Save(CaptureOf(memory, 2)); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ASSERT_TRUE(Hold(*writer));
  Update(memory, twin);
  EXPECT_TRUE(writer->WaitDurable(2, kLong)) << writer->status().last_drop;
  EXPECT_TRUE(KeptOf(2) == truth);
  Synchronize();
}

// A device without memory for small tensors has the save wait for them, as long as that lasts.
TEST_F(DeviceSavesTest, WithoutMemoryOfTheDeviceSmallOnesAreWaitedFor) {
  Start();
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 300, 3, 7}), twin({30'000, 300, 3, 7});
  for (uint64_t step = 0; step < 4; ++step) {
    RefuseMemory(step < 2);
    const uint64_t before = Waits();
    Gate(false);
    Update(memory, twin);
    const std::string truth = twin.Truth(step, 0, 1);
    auto saving = std::async([&] { return writer->Save(CaptureOf(memory, step)); });
    if (step < 2) {
      EXPECT_EQ(saving.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    } else {
      EXPECT_TRUE(saving.get());
      EXPECT_LE(Waits() - before, 1u);
    }
    Gate(true);
    if (saving.valid()) {
      EXPECT_TRUE(saving.get());
    }
    ASSERT_TRUE(Hold(*writer));
    Update(memory, twin);
    EXPECT_TRUE(writer->WaitDurable(step, kLong)) << writer->status().last_drop;
    EXPECT_TRUE(KeptOf(step) == truth) << step;
    EXPECT_EQ(DeviceMemory() > 0, step >= 2) << step;
  }
  Synchronize();
}

// Tensors of 64 KiB that are packed, and as many numbers that are taken.
TEST_F(DeviceSavesTest, ManySmallTensors) {
  ReceiverOptions receiver = Options();
  receiver.memory_bytes = uint64_t{64} << 20;
  receiver.chunk_bytes = uint64_t{1} << 20;
  auto started = Receiver::Start(std::move(receiver));
  ASSERT_TRUE(started) << started.error().message;
  receiver_ = *std::move(started);
  const auto writer = WriterOf();
  std::vector<uint64_t> sizes;
  for (size_t i = 0; i < 150; ++i) sizes.insert(sizes.end(), {16'384, 1});
  const RankMemory memory(sizes), twin(sizes);
  for (uint64_t step = 0; step < 3; ++step) {
    const std::string truth = twin.Truth(step, 0, 1);
    ASSERT_TRUE(writer->Save(CaptureOf(memory, step))) << writer->status().last_drop;
    if (step == 1) writer->WaitBeforeUpdate();
    ASSERT_TRUE(Hold(*writer));
    Update(memory, twin);
    EXPECT_TRUE(writer->WaitDurable(step, kLong)) << writer->status().last_drop;
    EXPECT_TRUE(KeptOf(step) == truth);
  }
  Synchronize();
}

// Made and page-locked ahead, the arena is there when the first save comes.
TEST_F(DeviceSavesTest, AnArenaIsMadeBeforeTheFirstSave) {
  Start();
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 3});
  Capture capture = CaptureOf(memory, 0);
  writer->Expect(writer->SizeOf(CaptureOf(memory, 0))->file_bytes, 1);
  EXPECT_TRUE(Hold(*writer));  // there is nothing to wait for
  while (writer->status().pinned_bytes == 0) std::this_thread::yield();
  const uint64_t arena = writer->status().arena_bytes;
  EXPECT_EQ(Pinned(), arena);
  ASSERT_TRUE(writer->Save(std::move(capture)));
  EXPECT_TRUE(Hold(*writer));
  EXPECT_TRUE(writer->WaitDurable(0, kLong));
  EXPECT_EQ(writer->status().arena_bytes, arena);
  writer->Close();
  EXPECT_EQ(Pinned(), 0u);
}

TEST_F(DeviceSavesTest, AnArenaThatIsTooSmallIsReplaced) {
  Start();
  for (const bool used : {true, false}) {
    const auto writer = WriterOf();
    const RankMemory memory({30'000, 3});
    writer->Expect(10, 1);
    if (used) {
      ASSERT_TRUE(writer->Save(CaptureOf(memory, used ? 1 : 2)));
      EXPECT_TRUE(Hold(*writer));
      EXPECT_TRUE(writer->WaitDurable(1, kLong));
      EXPECT_EQ(Pinned(), writer->status().arena_bytes);
    }
  }
  EXPECT_EQ(Pinned(), 0u);
  const auto nobody = std::make_unique<SnapshotWriter>(WriterOptions{
      .store = "/nowhere", .run = "run", .job = "job", .make_copier = [] { return Open(); }});
  nobody->Expect(10, 1);
  EXPECT_FALSE(nobody->Save(CaptureOf(RankMemory({10}), 1)));
}

// The host waits then, and the step is there.
TEST_F(DeviceSavesTest, WithoutPageLockedMemoryTheHostWaitsAndThatIsSaid) {
  Start();
  RefusePins(true);
  const auto writer = WriterOf();
  const RankMemory memory({30'000, 3});
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(writer->Save(CaptureOf(memory, step)));
    const std::vector streams{Training()};
    EXPECT_FALSE(writer->HoldUpdate(streams));
    writer->WaitBeforeUpdate();
    EXPECT_TRUE(writer->WaitDurable(step, kLong));
  }
  EXPECT_THAT(writer->TakeLog(), testing::ElementsAre(testing::HasSubstr("page-locked")));
}

// Every call of the driver fails once, between a save and the end of its copies.
TEST_F(DeviceSavesTest, WhateverFailsAHeldUpdateLeavesTheTruthOrNothing) {
  Start();
  size_t failed = 0;
  for (uint64_t at = 1; at < 70; ++at) {
    SCOPED_TRACE(at);
    const auto writer = WriterOf();
    const RankMemory memory({5000, 3, 700}), twin({5000, 3, 700});
    for (uint64_t step = 0; step < 3; ++step) {
      Update(memory, twin);
      const uint64_t number = 10 * at + step;
      const std::string truth = twin.Truth(number, 0, 1);
      Synchronize();  // a device that fails loses the work that it was given
      if (step == 1) FailAt(at);
      const bool taken = writer->Save(CaptureOf(memory, number));
      EXPECT_TRUE(taken || step == 1) << writer->status().last_drop;
      const std::vector streams{Training()};
      if (!writer->HoldUpdate(streams)) writer->WaitBeforeUpdate();
      FailAt(0);
      Update(memory, twin);
      const bool durable = writer->WaitDurable(number, kLong);
      EXPECT_TRUE(durable || step == 1) << writer->status().last_drop;
      failed += durable ? 0 : 1;
      EXPECT_TRUE(!durable || KeptOf(number) == truth);
    }
    Synchronize();
  }
  EXPECT_GT(failed, 5u);
  EXPECT_EQ(Pinned(), 0u);
  EXPECT_EQ(DeviceMemory(), 0u);
  EXPECT_EQ(Contexts(), 0u);
}

}  // namespace
}  // namespace ckptfs
