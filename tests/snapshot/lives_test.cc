// SPDX-License-Identifier: Apache-2.0
//
// Processes of two lives of a job that was given one text, and a daemon that is slow to hear of
// their ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/snapshot/killed.h"
#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using testing_support::Client;
using testing_support::kForks;
using testing_support::Killed;
using testing_support::kLong;
using testing_support::kSmallChunk;
using testing_support::ReceiverTest;

constexpr uint64_t kStep = 4;
constexpr uint32_t kChunks = 100;  // more than a daemon reads of a rank at once
constexpr uint64_t kPayload = kSmallChunk - kArenaPage;

// A rank that hands a file of so many chunks over, and says when it has greeted and when it is
// over.
void HandOver(const std::string& store, uint32_t rank, uint32_t chunks,
              const std::function<void()>& ready) {
  Client client(store, "job");
  client.Say(client.Hello(rank, 2, kChunks * kPayload));
  if (rank == 1) ready();  // before it is answered
  const auto welcome = client.Hear();
  if (!welcome || welcome->word != SnapshotWord::kWelcome) _exit(3);
  const auto arena = *ArenaWriter::Open(
      client.memory().get(), {welcome->length, static_cast<uint32_t>(welcome->sequence)});
  if (rank == 0) ready();
  SnapshotMessage message = client.Begin(chunks * kPayload);
  message.step = kStep;
  message.attempt = NextAttempt(0, kStep);
  client.Say(message);
  message.word = SnapshotWord::kChunk;
  message.length = 0;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    ChunkHeader header;
    header.rank = rank;
    header.stream = client.Stream();
    header.step = kStep;
    header.attempt = message.attempt;
    header.sequence = chunk;
    header.length = kPayload;
    arena->WriteHeader(chunk, header);
    message.chunk = message.sequence = chunk;
    client.Say(message);
  }
  message.word = SnapshotWord::kEnd;
  message.chunk = message.sequence = 0;
  client.Say(message);
}

// A daemon whose next line in its log takes until it is let go.
class LivesTest : public ReceiverTest {
 protected:
  void StartSlow() {
    ReceiverOptions options = Options();
    options.log = [this](std::string_view) {
      std::unique_lock lock(gate_);
      stands_ = true;
      turned_.notify_all();
      turned_.wait(lock, [&] { return goes_; });
    };
    receiver_ = *Receiver::Start(std::move(options));
  }
  void Stand() {
    Client stranger(directory_.path());
    stranger.Say(stranger.Begin(1));  // without a hello
    std::unique_lock lock(gate_);
    turned_.wait(lock, [&] { return stands_; });
  }
  void GoOn() {
    const std::lock_guard lock(gate_);
    goes_ = true;
    turned_.notify_all();
  }
  void TearDown() override {
    GoOn();
    ReceiverTest::TearDown();
  }

  std::mutex gate_;
  std::condition_variable turned_;
  bool stands_ = false, goes_ = false;
};

TEST_F(LivesTest, WhatADeadRankStillHasToSayIsHeardBeforeTheNextLifes) {
  if (!kForks) GTEST_SKIP();
  StartSlow();
  Killed first(0, [this](const auto& ready) { HandOver(directory_.path(), 0, kChunks, ready); });
  first.WaitUntilReady();
  Stand();
  EXPECT_FALSE(first.End());  // all is said, and nothing heard
  Killed second(0, [this](const auto& ready) { HandOver(directory_.path(), 1, 1, ready); });
  second.WaitUntilReady();
  GoOn();
  EXPECT_FALSE(second.End());
  while (status()["ranks"] != 0) std::this_thread::yield();
  EXPECT_EQ(status()["last_drop"],
            "snapshot run/4 dropped: rank 0 had gone when rank 1's process began");
  while (status()["waiting"] != 0) std::this_thread::yield();
  EXPECT_TRUE(kept().empty()) << "rank 0's part is of an earlier life";
}

}  // namespace
}  // namespace ckptfs
