// SPDX-License-Identifier: Apache-2.0
//
// CudaCopier on a driver that is not one (tests/support/fake_cuda.cc).
#include "snapshot/device/cuda_copier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <random>

#include "tests/snapshot/on_fake_cuda.h"

namespace ckptfs {
namespace {

using testing_support::kLong;
using testing_support::RankMemory;

class CudaCopierTest : public testing_support::FakeCudaTest {};

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

// Each in a place of its own on the device, side by side on the host, one behind the other and with
// gaps, of odd sizes and at odd addresses; later ones use the rooms of earlier ones again.
TEST_F(CudaCopierTest, SmallOnesBesideEachOtherArePacked) {
  const auto copier = Open();
  std::mt19937 random(3);
  for (int round = 0; round < 6; ++round) {
    std::vector<std::string> from;
    std::string all, to;
    std::vector<size_t> places;
    for (int i = 0; i < 400; ++i) {
      const size_t gap = random() % 50 == 0 ? 1 : 0;
      all += std::string(gap, '?');
      places.push_back(all.size());
      from.emplace_back(1 + random() % (i % 7 == 0 ? 600'000 : 3000), static_cast<char>(random()));
      all += from.back();
    }
    to.assign(all.size(), '?');
    std::vector<MemoryCopy> copies;
    for (size_t i = 0; i < from.size(); ++i) {
      copies.push_back(CopyOf(from[i], to, 1));
      copies.back().to += places[i];
      copies.back().bytes = from[i].size();
    }
    Gate(round % 2 == 0);
    const uint64_t before = Calls();
    ASSERT_TRUE(copier->Enqueue(copies, Trainer::kGoesOn));
    EXPECT_LT(Calls() - before, from.size());
    Gate(true);
    ASSERT_TRUE(copier->Wait());
    EXPECT_TRUE(to == all) << round;
  }
  EXPECT_LE(DeviceMemory(), uint64_t{65} << 20);
}

TEST_F(CudaCopierTest, SmallOnesArriveWithoutMemoryOrKernels) {
  for (const bool kernels : {false, true}) {
    const auto copier = Open(kernels ? "a kernel" : "");
    RefuseMemory(true);
    const std::string from(50'000, 'f');
    std::string to(50'000, '?');
    std::vector<MemoryCopy> copies;
    for (size_t at = 0; at < from.size(); at += 1000) {
      copies.push_back({reinterpret_cast<const std::byte*>(from.data()) + at,
                        reinterpret_cast<std::byte*>(to.data()) + at, 1000, 1});
    }
    ASSERT_TRUE(copier->Enqueue(copies, Trainer::kGoesOn));
    ASSERT_TRUE(copier->Wait());
    EXPECT_EQ(to, from);
    EXPECT_EQ(DeviceMemory(), 0u);
  }
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
  Synchronize();  // `memory` is not written any more
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
    std::vector<MemoryCopy> copies{CopyOf(memory, copied, 1)};
    constexpr size_t kSmallBytes = 1000;
    copies[0].bytes -= 8 * kSmallBytes;
    for (size_t i = 8; i > 0; --i) {
      copies.push_back(CopyOf(memory, copied, 1));
      copies.back().from += memory.size() - i * kSmallBytes;
      copies.back().to += memory.size() - i * kSmallBytes;
      copies.back().bytes = kSmallBytes;
    }
    Status done = copier->Follow(streams);
    if (done) done = copier->Enqueue(copies, Trainer::kWaits);
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
  EXPECT_FALSE(copier->Pin(memory, 7));  // there is no such device
  {
    const auto pinned = copier->Pin(memory, 1);
    ASSERT_TRUE(pinned);
    EXPECT_EQ(Pinned(), arena.size());
  }
  EXPECT_EQ(Pinned(), 0u);
  RefusePins(true);
  EXPECT_FALSE(copier->Pin(memory, 1));
}

// The device is behind when it is asked, and goes on meanwhile: the digests are of between.
TEST_F(CudaCopierTest, DigestsAreOfTheirMoment) {
  const auto copier = Open();
  std::string memory(70'000, 'a');
  const std::vector<MemoryPiece> pieces{
      {reinterpret_cast<const std::byte*>(memory.data()), 65'536, 1},
      {reinterpret_cast<const std::byte*>(memory.data()) + 65'536, 7, 1}};
  const std::vector streams{DeviceStream{1, reinterpret_cast<uint64_t>(Stream(1))}, Training()};
  Gate(false);
  Update(memory);
  const auto moment = copier->TakeMoment(pieces, {}, streams);
  ASSERT_TRUE(moment) << moment.error().message;
  Update(memory);
  Gate(true);
  Synchronize();
  EXPECT_EQ(memory, std::string(70'000, 'c'));
  const std::string truth(65'536, 'b');
  const auto bytes = std::as_bytes(std::span(truth));
  EXPECT_EQ(*moment->digests[0], PieceDigestOf(bytes));
  EXPECT_EQ(*moment->digests[1], PieceDigestOf(bytes.first(7)));
}

TEST_F(CudaCopierTest, WhereNothingDigestsThatIsSaid) {
  std::string memory(1000, 'a');
  const MemoryPiece piece{reinterpret_cast<const std::byte*>(memory.data()), 1000, 1};
  const std::vector streams{Training()};
  const auto refusal = [&](CudaCopier& copier, std::span<const DeviceStream> on) {
    const auto moment = copier.TakeMoment({&piece, 1}, {}, on);
    return moment                                           ? "none"
           : moment.error().code == ErrorCode::kUnsupported ? moment.error().message
                                                            : "other";
  };
  EXPECT_THAT(refusal(*Open(""), streams), testing::HasSubstr("CUDA's compiler"));
  const auto copier = Open();
  EXPECT_THAT(refusal(*copier, {}), testing::HasSubstr("no stream"));
  Capturing(true);
  EXPECT_THAT(refusal(*copier, streams), testing::HasSubstr("graph"));
  Capturing(false);
  RefuseModules(true);
  EXPECT_THAT(refusal(*copier, streams), testing::HasSubstr("cuModuleLoadData"));
}

// The device is behind: a save that takes nothing of it at once does not wait for it.
TEST_F(CudaCopierTest, ASaveDoesNotWaitForADeviceThatItTakesNothingOf) {
  Start();
  const auto writer = std::make_unique<SnapshotWriter>(
      WriterOptions{directory_.path(), "run", "job", 0, 1, 2, kLong, [] { return Open(); }});
  RankMemory memory({30'000, 3});
  memory.Fill(1);
  Capture capture = memory.Save(1, 0);
  for (CapturedTensor& tensor : capture.tensors) tensor.device = tensor.lazy ? 1 : kHost;
  capture.streams = {Training()};
  Gate(false);
  EXPECT_TRUE(writer->Save(std::move(capture)));
  Gate(true);
  EXPECT_TRUE(writer->WaitDurable(1, kLong));
}

// Some code writes between the save and the copy, and tells nobody (a replayed graph, an average
// that is swapped in): one row of the memory is enough.
TEST_F(CudaCopierTest, AWriteOnTheDeviceThatNobodyCountedDropsTheStepByName) {
  Start();
  WriterOptions options{directory_.path(), "run", "job", 0, 1, 2, kLong, [] { return Open(); }};
  options.pace = 1;  // the first chunk is copied, and all others when an update asks
  const auto writer = std::make_unique<SnapshotWriter>(std::move(options));
  RankMemory memory({30'000, 3, 70'000});
  for (uint64_t step = 0; step < 4; ++step) {
    memory.Fill(static_cast<unsigned char>(step));
    Capture capture = memory.Save(step, 0);
    for (CapturedTensor& tensor : capture.tensors) tensor.device = tensor.lazy ? 1 : kHost;
    auto* const byte = const_cast<std::byte*>(capture.tensors[2].from) + 200'001;
    capture.streams = {Training()};
    const std::string truth = memory.Truth(step, 0, 1);
    ASSERT_TRUE(writer->Save(std::move(capture)));
    Synchronize();
    if (step % 2 == 1) *byte ^= std::byte{1};
    writer->WaitBeforeUpdate();
    EXPECT_EQ(writer->WaitDurable(step, kLong), step % 2 == 0) << writer->status().last_drop;
    EXPECT_TRUE(step % 2 == 1 || kept().back().files[0] == truth);
  }
  EXPECT_EQ(writer->status().unproved, 0u);
  EXPECT_THAT(writer->status().last_drop,
              testing::HasSubstr("p2.of0 was written before the update: code that writes it must "
                                 "call before_update()"));
}

TEST_F(CudaCopierTest, AnUnprovedStepIsSavedAndSaidOnce) {
  Start();
  RefuseModules(true);
  const auto writer = std::make_unique<SnapshotWriter>(
      WriterOptions{directory_.path(), "run", "job", 0, 1, 2, kLong, [] { return Open(); }});
  RankMemory memory({30'000});
  for (uint64_t step = 0; step < 3; ++step) {
    memory.Fill(1);
    Capture capture = memory.Save(step, 0);
    for (CapturedTensor& tensor : capture.tensors) tensor.device = 1;
    capture.streams = {Training()};
    ASSERT_TRUE(writer->Save(std::move(capture)));
    writer->WaitBeforeUpdate();
    EXPECT_TRUE(writer->WaitDurable(step, kLong));
  }
  EXPECT_EQ(writer->status().unproved, 3u);
  EXPECT_EQ(writer->status().unproved_bytes, 120'000u);
  EXPECT_THAT(writer->TakeLog(), testing::ElementsAre(testing::HasSubstr("unproved")));
}

// A job whose tensors lie on device 1, of which every call of the driver fails once.
TEST_F(CudaCopierTest, AStepFromADeviceIsTheTruthOrNothing) {
  Start();
  size_t failed = 0;
  for (uint64_t at = 0; at < 60; ++at) {
    SCOPED_TRACE(at);
    const auto writer = std::make_unique<SnapshotWriter>(WriterOptions{
        directory_.path(), "run", StrCat("job", at), 0, 1, 2, kLong, [] { return Open(); }});
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
