// SPDX-License-Identifier: Apache-2.0
//
// CudaCopier on a driver that is not one (tests/support/fake_cuda.cc).  No GPU has run it.
#include "snapshot/cuda_copier.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <map>

#include "tests/snapshot/receiving.h"
#include "tests/support/fake_cuda.h"

namespace ckptfs {
namespace {

using testing_support::kLong;
using testing_support::RankMemory;
using testing_support::ReceiverTest;

template <class Call>
Call* Fake(const char* name) {
  static void* library = dlopen(CKPTFS_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Call*>(dlsym(library, name));
}
void Gate(bool open) { Fake<FakeCudaGate>("FakeCudaGateCall")(open); }
void FailAt(uint64_t n) { Fake<FakeCudaFailAt>("FakeCudaFailAtCall")(n); }
uint64_t Calls() { return Fake<FakeCudaCalls>("FakeCudaCallsCall")(); }
uint64_t Contexts() { return Fake<FakeCudaContexts>("FakeCudaContextsCall")(); }
uint64_t Pinned() { return Fake<FakeCudaPinned>("FakeCudaPinnedCall")(); }
void RefusePins(bool refuse) { Fake<FakeCudaRefusePins>("FakeCudaRefusePinsCall")(refuse); }
void* Stream(int device) { return Fake<FakeCudaStream>("FakeCudaStreamCall")(device); }

// The training job's own stream; streams are never given back.
DeviceStream Training(int device = 1) {
  static std::map<int, void*> streams;
  void*& stream = streams[device];
  if (stream == nullptr) stream = Stream(device);
  return {device, reinterpret_cast<uint64_t>(stream)};
}
// An update of all bytes, on the training job's stream.
void Update(std::string& memory, int device = 1) {
  Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
      reinterpret_cast<void*>(Training(device).handle),
      [](void* argument) {
        for (char& byte : *static_cast<std::string*>(argument)) ++byte;
      },
      &memory);
}

class CudaCopierTest : public ReceiverTest {
 protected:
  void SetUp() override {
    FailAt(0);
    RefusePins(false);
    Gate(true);
  }
  void TearDown() override {
    SetUp();
    ReceiverTest::TearDown();
  }
  static std::unique_ptr<CudaCopier> Open() { return *CudaCopier::Open(CKPTFS_FAKE_CUDA); }
  static std::string Filled(size_t bytes, char with) { return std::string(bytes, with); }
  static MemoryCopy CopyOf(const std::string& from, std::string& to, int device) {
    return {reinterpret_cast<const std::byte*>(from.data()),
            reinterpret_cast<std::byte*>(to.data()), from.size(), device};
  }
};

TEST_F(CudaCopierTest, WhereThereIsNoDriverThereIsNoCopier) {
  for (const char* library : {"/nowhere/libcuda.so.1", "libm.so.6"}) {
    const auto copier = CudaCopier::Open(library);
    ASSERT_FALSE(copier);
    EXPECT_EQ(copier.error().code, ErrorCode::kUnsupported);
  }
}

TEST_F(CudaCopierTest, BytesOfDevicesAndOfTheHostArrive) {
  const auto copier = Open();
  constexpr size_t kMany = 50'000'000;  // more than one call takes
  const std::string on_host(1000, 'h'), on_one = Filled(kMany, 'd'), on_two(7, 't');
  std::string host(1000, '?'), one = Filled(kMany, '?'), two(7, '?');
  const std::vector<MemoryCopy> copies{CopyOf(on_host, host, kHost), CopyOf(on_one, one, 1),
                                       CopyOf(on_two, two, 2)};
  ASSERT_TRUE(copier->Enqueue(copies, Trainer::kWaits));
  ASSERT_TRUE(copier->Wait());
  EXPECT_TRUE(host == on_host && one == on_one && two == on_two);
  EXPECT_LE(Fake<FakeCudaLargest>("FakeCudaLargestCall")(), size_t{16} << 20);
}

// The device is behind, and nobody waits for it before all are begun.
TEST_F(CudaCopierTest, SmallOnesAreBegunTogether) {
  const auto copier = Open();
  std::vector<std::string> from, to(100, std::string(50, '?'));
  for (int i = 0; i < 100; ++i) from.emplace_back(50, static_cast<char>('0' + i));
  std::vector<MemoryCopy> copies;
  for (size_t i = 0; i < from.size(); ++i) copies.push_back(CopyOf(from[i], to[i], i % 2 ? 1 : 2));
  const std::vector streams{Training(1), Training(2)};
  ASSERT_TRUE(copier->Follow(streams));
  Gate(false);
  const uint64_t before = Calls();
  ASSERT_TRUE(copier->Enqueue(copies, Trainer::kWaits));
  EXPECT_EQ(Calls() - before, from.size());  // begun, and nothing else
  Gate(true);
  ASSERT_TRUE(copier->Wait());
  EXPECT_TRUE(to == from);
}

TEST_F(CudaCopierTest, OnlyDevicesThatAreUsedHaveAContext) {
  EXPECT_EQ(Contexts(), 0u);
  {
    const auto copier = Open();
    EXPECT_EQ(Contexts(), 0u);
    const std::string from(7, 'd');
    std::string to(7, '?');
    const MemoryCopy copy = CopyOf(from, to, 3);
    ASSERT_TRUE(copier->Enqueue({&copy, 1}, Trainer::kWaits));
    ASSERT_TRUE(copier->Wait());
    EXPECT_EQ(Contexts(), 8u);
  }
  EXPECT_EQ(Contexts(), 0u);
}

// The device is behind: what it was told before the save is done before the copy.
TEST_F(CudaCopierTest, CopiesComeAfterWhatTheStreamWasGiven) {
  const auto copier = Open();
  std::string memory(1000, 'a'), ordered(1000, '?');
  Gate(false);
  Update(memory);
  const std::vector streams{Training()};
  ASSERT_TRUE(copier->Follow(streams));
  const MemoryCopy copy = CopyOf(memory, ordered, 1);
  ASSERT_TRUE(copier->Enqueue({&copy, 1}, Trainer::kWaits));
  Gate(true);
  ASSERT_TRUE(copier->Wait());
  EXPECT_EQ(ordered, std::string(1000, 'b'));
}

// The fake keeps no order but that of events: the test above can fail.
TEST_F(CudaCopierTest, WithoutAnEventNothingIsOrdered) {
  const auto copier = Open();
  std::string memory(1000, 'a'), unordered(1000, '?');
  std::promise<void> gate;
  Fake<FakeCudaLaunch>("FakeCudaLaunchCall")(
      reinterpret_cast<void*>(Training().handle),
      [](void* opened) { static_cast<std::promise<void>*>(opened)->get_future().wait(); }, &gate);
  Update(memory);
  const MemoryCopy copy = CopyOf(memory, unordered, 1);
  ASSERT_TRUE(copier->Enqueue({&copy, 1}, Trainer::kWaits));
  ASSERT_TRUE(copier->Wait());
  EXPECT_EQ(unordered[0], 'a');
  gate.set_value();
  const std::vector streams{Training()};
  ASSERT_TRUE(copier->Follow(streams));
  ASSERT_TRUE(copier->Wait());  // `memory` is not written any more
}

// At every call: an error, and nothing is copied after it.
TEST_F(CudaCopierTest, WhateverFailsNothingMovesAfterwards) {
  bool went_through = false;
  for (uint64_t at = 1; !went_through; ++at) {
    ASSERT_LT(at, 100u);
    const auto copier = Open();
    std::string memory = Filled(20'000'000, 'a'), copied = Filled(memory.size(), '?');
    FailAt(at);
    const std::vector streams{Training()};
    const MemoryCopy copy = CopyOf(memory, copied, 1);
    Status done = copier->Follow(streams);
    if (done) done = copier->Enqueue({&copy, 1}, Trainer::kWaits);
    if (done) done = copier->Wait();
    went_through = done.has_value();
    EXPECT_EQ(went_through, Calls() < at) << at;
    const std::string said = went_through ? "CUDA_ERROR" : done.error().message;
    EXPECT_THAT(said, testing::HasSubstr("CUDA_ERROR"));
    const std::string after = copied;
    FailAt(0);
    Gate(true);
    (void)copier->Wait();
    EXPECT_TRUE(after == copied) << at;
    EXPECT_TRUE(!went_through || copied == memory);
  }
}

TEST_F(CudaCopierTest, TheArenaIsPinnedWhereThatGoes) {
  const auto copier = Open();
  std::string arena(1 << 20, '?');
  const auto memory = std::as_writable_bytes(std::span(arena));
  EXPECT_EQ(copier->Pin(memory), nullptr);  // no device is known yet
  const std::vector streams{Training()};
  ASSERT_TRUE(copier->Follow(streams));
  auto pinned = copier->Pin(memory);
  EXPECT_NE(pinned, nullptr);
  EXPECT_EQ(Pinned(), arena.size());
  pinned.reset();
  EXPECT_EQ(Pinned(), 0u);
  RefusePins(true);
  EXPECT_EQ(copier->Pin(memory), nullptr);
}

// A job whose tensors lie on device 1, of which every call of the driver fails once.
TEST_F(CudaCopierTest, AStepFromADeviceIsTheTruthOrNothing) {
  Start();
  size_t failed = 0;
  for (uint64_t at = 0; at < 60; ++at) {
    SCOPED_TRACE(at);
    const auto writer = std::make_unique<SnapshotWriter>(
        WriterOptions{directory_.path(), "run", StrCat("job", at), 0, 1, 2, kLong,
                      [] { return Open(); }});
    RankMemory memory({5000, 3, 700});
    for (uint64_t step = 0; step < 3; ++step) {
      memory.Fill(static_cast<unsigned char>(at + step));
      Capture capture = memory.Save(100 * at + step, 0);
      for (CapturedTensor& tensor : capture.tensors) tensor.device = 1;
      capture.streams = {Training()};
      const std::string truth = memory.Truth(100 * at + step, 0, 1);
      if (step == 1) FailAt(at);
      const bool taken = writer->Save(std::move(capture));
      EXPECT_TRUE(taken || step == 1) << writer->status().last_drop;
      writer->WaitBeforeUpdate();
      FailAt(0);
      memory.Fill(0xee);
      const bool durable = writer->WaitDurable(100 * at + step, kLong);
      EXPECT_TRUE(durable || step == 1) << writer->status().last_drop;
      failed += durable ? 0 : 1;
      EXPECT_TRUE(!durable || kept().back().files[0] == truth);
    }
  }
  EXPECT_GT(failed, 5u);
  EXPECT_EQ(Pinned(), 0u);
  EXPECT_EQ(Contexts(), 0u);
}

}  // namespace
}  // namespace ckptfs
