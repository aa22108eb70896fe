// SPDX-License-Identifier: Apache-2.0
#include "snapshot/receive/receiver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/snapshot/killed.h"
#include "tests/snapshot/memory_policy.h"
#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using testing_support::Client;
using testing_support::kForks;
using testing_support::kLong;
using testing_support::kSmallChunk;
using testing_support::MemoryPolicyOf;
using testing_support::RankMemory;
using testing_support::ReceiverTest;

// Far more saves than the arena has room for, each followed at once by an update of
// every byte.
TEST_F(ReceiverTest, EverySaveHoldsTheMomentOfItsSave) {
  Start();
  const auto writer = Writer(0, 1, [] { return std::make_unique<LateCopier>(); });
  RankMemory memory({5000, 1, 777, 0, 4000});
  for (uint64_t step = 0; step < 50; ++step) {
    memory.Fill(static_cast<unsigned char>(step));
    const std::string truth = memory.Truth(step, 0, 1);
    ASSERT_TRUE(writer->Save(memory.Save(step, 0))) << writer->status().last_drop;
    memory.ChangeEager();
    writer->WaitBeforeUpdate();
    memory.Fill(0xee);
    ASSERT_TRUE(writer->WaitDurable(step, kLong)) << writer->status().last_drop;
    ASSERT_EQ(kept().back().step, step);
    ASSERT_TRUE(kept().back().files[0] == truth);
  }
  EXPECT_EQ(writer->status().durable, 50u);
  EXPECT_TRUE(writer->TakeLog().empty());
}

TEST_F(ReceiverTest, AStepHasThePartsOfAllRanks) {
  Start();
  const auto one = Writer(1, 2);
  const auto zero = Writer(0, 2);
  RankMemory memory({3000, 10});
  memory.Fill(1);
  ASSERT_TRUE(one->Save(memory.Save(4, 1)));
  EXPECT_FALSE(one->WaitDurable(4, milliseconds(0)));
  ASSERT_TRUE(zero->Save(memory.Save(4, 0)));
  EXPECT_TRUE(one->WaitDurable(4, kLong));
  EXPECT_TRUE(zero->WaitDurable(4, kLong));
  ASSERT_EQ(kept().size(), 1u);
  EXPECT_EQ(kept()[0].files, (std::vector{memory.Truth(4, 0, 2), memory.Truth(4, 1, 2)}));
}

// A rank says where it runs; a stranger may say anything.
TEST_F(ReceiverTest, AnArenaLiesOnTheNodeThatItsTrainerRunsOn) {
  Start();
  RankMemory memory({100});
  const auto writer = Writer();
  ASSERT_TRUE(writer->Save(memory.Save(1, 0)));
  unsigned processor = 0, node = 0;
  ASSERT_EQ(getcpu(&processor, &node), 0);
  int arenas = 0;  // the trainer's is in this process
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (!read_symlink(entry.path(), gone).string().starts_with("/memfd:ckptfs-snap")) continue;
    const auto policy = MemoryPolicyOf(std::stoi(entry.path().filename()));
    EXPECT_EQ(policy, (std::pair<int, unsigned long>(MPOL_PREFERRED, 1UL << node)));
    ++arenas;
  }
  EXPECT_GE(arenas, 1);
  for (const uint64_t said : {uint64_t{0}, uint64_t{1} << 40, UINT64_MAX}) {
    Client client(directory_.path());
    SnapshotMessage hello = client.Hello(0, 1, 100);
    hello.chunk = said;
    client.Say(hello);
    const auto welcome = client.Hear();
    ASSERT_TRUE(welcome && welcome->word == SnapshotWord::kWelcome);
    EXPECT_EQ(MemoryPolicyOf(client.memory().get()).first, MPOL_DEFAULT);
  }
}

TEST_F(ReceiverTest, ATensorThatWasWrittenMeanwhileIsNamed) {
  Start();
  const auto writer = Writer();
  RankMemory memory({3000});
  ASSERT_TRUE(writer->Save(memory.Save(1, 0, "model.norm.weight")));
  EXPECT_FALSE(writer->WaitDurable(1, kLong));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("model.norm.weight was written"));
  EXPECT_EQ(writer->TakeLog().size(), 1u);
  ASSERT_TRUE(writer->Save(memory.Save(2, 0)));
  EXPECT_TRUE(writer->WaitDurable(2, kLong));
  EXPECT_EQ(kept().size(), 1u);
}

// Helpers that it forked have its socket still.
TEST_F(ReceiverTest, WhoIsKilledIsGone) {
  Start();
  int until[2];
  ASSERT_EQ(pipe(until), 0);
  const pid_t rank = fork();
  if (rank == 0) {
    Client client(directory_.path());
    client.Say(client.Hello(0, 1, 100));
    const bool welcome = client.Hear().has_value();
    if (fork() == 0) {
      char end;
      close(until[1]);
      _exit(static_cast<int>(read(until[0], &end, 1)));
    }
    _exit(welcome ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(rank, &status, 0), rank);
  EXPECT_EQ(status, 0);
  const auto ranks = [&] { return receiver_->status().ranks; };
  for (int i = 0; i < 100 && ranks() != 0; ++i) std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(ranks(), 0u);
  close(until[0]);
  close(until[1]);
}

// Nobody here hears the daemon's answer.
TEST_F(ReceiverTest, NothingIsUnderWayAfterClose) {
  Start();
  Hold(true);
  const auto writer = Writer();
  RankMemory memory({100});
  ASSERT_TRUE(writer->Save(memory.Save(1, 0)));
  writer->Close();
  EXPECT_EQ(writer->status().under_way, 0u);
  EXPECT_FALSE(writer->WaitDurable(1, std::chrono::hours(1)));
  Hold(false);
}

TEST_F(ReceiverTest, AFullArenaDropsTheSnapshotAndSaysSoOnce) {
  Start();
  const auto writer = Writer();
  RankMemory memory({6000, 6000});
  Hold(true);
  EXPECT_TRUE(writer->Save(memory.Save(0, 0)));
  EXPECT_TRUE(writer->Save(memory.Save(1, 0)));
  for (uint64_t step = 2; step < 10; ++step) EXPECT_FALSE(writer->Save(memory.Save(step, 0)));
  EXPECT_EQ(writer->TakeLog().size(), 1u);
  EXPECT_EQ(writer->status().dropped, 8u);
  Hold(false);
  EXPECT_TRUE(writer->WaitDurable(0, kLong));
  EXPECT_TRUE(writer->WaitDurable(1, kLong));
  // The chunks come back with the bytes' last reader, after the step is durable.
  bool taken = false;
  for (uint64_t step = 10; step < 100'000 && !taken; ++step) {
    taken = writer->Save(memory.Save(step, 0));
  }
  EXPECT_TRUE(taken);
}

TEST_F(ReceiverTest, AnUpdateWaitsOnlySoLong) {
  Start();
  std::mutex gate;
  gate.lock();  // the copy does not move
  const auto writer = Writer(
      0, 1,
      [&] {
        return std::make_unique<LateCopier>(0, [&, first = true]() mutable {
          if (!std::exchange(first, false)) const std::lock_guard wait(gate);
        });
      },
      milliseconds(50));
  RankMemory memory({3000, 3000, 3000});
  ASSERT_TRUE(writer->Save(memory.Save(0, 0)));
  writer->WaitBeforeUpdate();
  gate.unlock();
  EXPECT_FALSE(writer->WaitDurable(0, kLong));
  EXPECT_TRUE(kept().empty());
}

TEST_F(ReceiverTest, ASnapshotThatOutgrowsItsArenaGetsAnother) {
  Start();
  const auto writer = Writer();
  for (const uint64_t elements : {10, 20'000, 60'000}) {
    RankMemory memory({elements});
    ASSERT_TRUE(writer->Save(memory.Save(elements, 0))) << writer->status().last_drop;
    EXPECT_TRUE(writer->WaitDurable(elements, kLong));
  }
  EXPECT_EQ(kept().size(), 3u);
}

TEST_F(ReceiverTest, AnArenaThatIsOutgrownMakesRoomForTheNext) {
  Start(kLong, 64, 64 * kSmallChunk);
  const auto writer = Writer();
  for (const uint64_t chunks : {15, 30}) {  // twice both of them is more than all
    const RankMemory memory({(chunks - 1) * (kSmallChunk - kArenaPage) / 4});
    ASSERT_TRUE(writer->Save(memory.Save(chunks, 0))) << writer->status().last_drop;
    EXPECT_TRUE(writer->WaitDurable(chunks, kLong));
  }
}

// Memory ends, say: training goes on, and the ranks still count their saves alike.
TEST_F(ReceiverTest, WhatIsThrownDropsOneSnapshot) {
  Start();
  for (const int throws : {0, 1}) {  // the copier of what cannot wait; the thread's
    int made = 0;
    bool thrown = false;
    const auto copiers = [&] {
      return std::make_unique<LateCopier>(0, [&thrown, mine = made++ == throws] {
        if (mine && !std::exchange(thrown, true)) throw std::bad_alloc();
      });
    };
    const std::string job = StrCat("job", throws);
    const auto options = [&](uint32_t rank) {
      return WriterOptions{directory_.path(), "run", job, rank, 2, 2, kLong, {}};
    };
    auto first = options(0);
    first.make_copier = copiers;
    SnapshotWriter bad(first), good(options(1));
    RankMemory zero({5000}), one({5000});
    EXPECT_EQ(bad.Save(zero.Save(1, 0)), throws == 1);
    EXPECT_TRUE(good.Save(one.Save(1, 1)));
    EXPECT_FALSE(bad.WaitDurable(1, kLong));
    EXPECT_TRUE(thrown);
    EXPECT_FALSE(good.WaitDurable(1, kLong));
    EXPECT_TRUE(bad.Save(zero.Save(2, 0)) && good.Save(one.Save(2, 1)));
    EXPECT_TRUE(bad.WaitDurable(2, kLong)) << bad.status().last_drop;
    EXPECT_TRUE(good.WaitDurable(2, kLong)) << good.status().last_drop;
    EXPECT_EQ(bad.status().under_way, 0u);
  }
}

TEST_F(ReceiverTest, MemoryHasALimit) {
  Start(kLong, 64, 1 << 20);
  const auto writer = Writer();
  RankMemory memory({1 << 18});
  EXPECT_FALSE(writer->Save(memory.Save(0, 0)));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("--snapshot-memory"));
  RankMemory small({100});
  EXPECT_TRUE(writer->Save(small.Save(1, 0)));
}

TEST_F(ReceiverTest, ARankThatNeverComesIsNamed) {
  Start(milliseconds(20));
  const auto writer = Writer(1, 3);
  RankMemory memory({100});
  ASSERT_TRUE(writer->Save(memory.Save(5, 1)));
  EXPECT_FALSE(writer->WaitDurable(5, kLong));
  EXPECT_THAT(writer->status().last_drop, testing::HasSubstr("nothing came from rank 0, 2"));
}

TEST_F(ReceiverTest, ARankThatMissesASaveIsThereAtTheNext) {
  Start();
  // There are as many slots as saves: room comes back after a step was told to be durable.
  const auto zero = Writer(0, 2, {}, kLong, 6);
  const auto one = Writer(1, 2, {}, kLong, 6);
  RankMemory memory({3000, 10});
  for (const uint64_t step : {10, 20, 30, 40}) {
    memory.Fill(static_cast<unsigned char>(step));
    ASSERT_TRUE(zero->Save(memory.Save(step, 0)));
    zero->WaitBeforeUpdate();
    if (step == 20) continue;
    ASSERT_TRUE(one->Save(memory.Save(step, 1)));
    ASSERT_TRUE(zero->WaitDurable(step, kLong)) << zero->status().last_drop;
  }
  EXPECT_FALSE(zero->WaitDurable(20, kLong));
  EXPECT_EQ(zero->status().last_drop, "step 20: rank 1 went on without it");
  EXPECT_EQ(kept().size(), 3u);

  // Nor is it alone after what it does alone: what is not a step, and one step again.
  one->Drop(std::nullopt, "minus one is not a step");
  EXPECT_EQ(one->status().last_drop, "minus one is not a step");
  EXPECT_EQ(one->status().saves, 4u);
  ASSERT_TRUE(one->Save(memory.Save(40, 1)));
  one->WaitBeforeUpdate();
  for (const auto& writer : {zero.get(), one.get()}) {
    ASSERT_TRUE(writer->Save(memory.Save(50, writer == one.get() ? 1 : 0)));
  }
  EXPECT_TRUE(one->WaitDurable(50, kLong)) << one->status().last_drop;
}

// The daemon says so, and only what it could not put together is lost.
TEST_F(ReceiverTest, ARankThatWentBackAloneIsWithTheOthersAgain) {
  Start(kLong, 64, 64 << 20);
  const auto zero = Writer(0, 2, {}, kLong, 6), one = Writer(1, 2, {}, kLong, 6);
  const RankMemory memory({3000, 10});
  const auto save = [&](SnapshotWriter& writer, uint64_t step) {
    EXPECT_TRUE(writer.Save(memory.Save(step, &writer == one.get() ? 1 : 0)));
    writer.WaitBeforeUpdate();
  };
  save(*zero, 1'000'000);  // a typing error, say
  for (const uint64_t step : {40, 41, 42}) {
    save(*zero, step);
    save(*one, step);
    EXPECT_EQ(zero->WaitDurable(step, kLong), step > 40) << zero->status().last_drop;
    EXPECT_EQ(one->WaitDurable(step, kLong), step > 40) << one->status().last_drop;
  }
  EXPECT_EQ(one->status().last_drop, "step 40: its ranks went back to different steps");
}

// A job that was queued again, with the text that it had.
TEST_F(ReceiverTest, LivesOfOneTextNeverMix) {
  Start(kLong, 64, 64 << 20);
  const RankMemory memory({3000, 10});
  const auto save = [&](SnapshotWriter& writer, uint64_t step, uint32_t rank) {
    const bool taken = writer.Save(memory.Save(step, rank));
    writer.WaitBeforeUpdate();
    return taken;
  };
  auto zero = Writer(0, 2), one = Writer(1, 2);
  ASSERT_TRUE(save(*zero, 4, 0) && save(*one, 4, 1) && zero->WaitDurable(4, kLong));
  ASSERT_TRUE(save(*zero, 5, 0));
  zero.reset();
  while (status()["ranks"] != 1) std::this_thread::yield();
  const auto arenas = status()["arena_bytes"];
  auto early = Writer(0, 2);
  EXPECT_FALSE(save(*early, 5, 0)) << "rank 1 is at work";
  EXPECT_THAT(early->status().last_drop, testing::HasSubstr("a `job` text of its own"));
  EXPECT_EQ(status()["arena_bytes"], arenas) << "it got one";
  one.reset();
  while (status()["ranks"] != 0) std::this_thread::yield();

  zero = Writer(0, 2), one = Writer(1, 2);
  ASSERT_TRUE(save(*one, 5, 1));
  EXPECT_FALSE(one->WaitDurable(5, milliseconds(300)));
  EXPECT_EQ(kept().size(), 1u) << "rank 0's part was of another life";
  ASSERT_TRUE(save(*zero, 5, 0));
  EXPECT_TRUE(one->WaitDurable(5, kLong)) << one->status().last_drop;
  EXPECT_EQ(status()["last_drop"], "snapshot run/5 dropped: another life of its job began");
}

TEST_F(ReceiverTest, OneDaemonOfAStoreReceives) {
  Start();
  ReceiverOptions options;
  options.store = directory_.path();
  options.memory_bytes = 1 << 20;
  Landing landing(LandingOptions{.steps = &steps_});
  options.landing = &landing;
  const auto second = Receiver::Start(options);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, ErrorCode::kExists);
  receiver_.reset();
  EXPECT_TRUE(Receiver::Start(options));
}

// ---- Clients that are not ours -----------------------------------------------------

TEST_F(ReceiverTest, HellosThatMakeNoSenseAreRefused) {
  Start();
  const Client any(directory_.path());
  std::vector<SnapshotMessage> bad{any.Hello(0, 0, 1), any.Hello(2, 2, 1), any.Hello(0, ~0u, 1),
                                   any.Hello(0, 1, 0), any.Hello(0, 1, ~uint64_t{0})};
  for (const char* text : {"", "run", "\njob", "../x\njob", "a/b\njob"}) {
    bad.push_back(any.Hello(0, 1, 1));
    bad.back().text = text;
  }
  bad.push_back(any.Hello(0, 1, 1));
  bad.back().text = "run\n" + std::string(500, 'j');
  for (const uint64_t slots : {uint64_t{0}, uint64_t{5000}, ~uint64_t{0}}) {
    bad.push_back(any.Hello(0, 1, 1));
    bad.back().sequence = slots;
  }
  for (const SnapshotMessage& hello : bad) {
    Client client(directory_.path());
    client.Say(hello);
    EXPECT_TRUE(client.IsThrownOut()) << hello.text << " " << hello.world;
  }
  EXPECT_EQ(status()["arena_bytes"], 0);
}

TEST_F(ReceiverTest, MessagesOutOfTurnEndTheConversation) {
  Start();
  using Script = std::function<void(Client&)>;
  const auto said = [](SnapshotWord word, uint64_t attempt) {
    SnapshotMessage message{word};
    message.attempt = attempt;
    return message;
  };
  const std::vector<Script> scripts{
      [&](Client& c) { c.Say(c.Hello(0, 1, 1)); },
      [&](Client& c) { c.Say(said(SnapshotWord::kWelcome, 1)); },
      [&](Client& c) { c.Say(said(SnapshotWord::kFree, 1)); },
      [&](Client& c) { c.Say(said(SnapshotWord::kEnd, 1)); },
      [&](Client& c) { c.Say(said(SnapshotWord::kChunk, 1)); },
      [&](Client& c) { c.Say(c.Begin(0)); },
      [&](Client& c) { c.Say(c.Begin(~uint64_t{0})); },
      [&](Client& c) {
        c.Say(c.Begin(100));
        c.Say(c.Begin(100));
      },
      [&](Client& c) {
        c.Say(c.Begin(100));
        c.Say(said(SnapshotWord::kEnd, 1));
      },
      [&](Client& c) {  // a chunk that is not there
        c.Say(c.Begin(100));
        SnapshotMessage chunk = c.Chunk(0, 0, 100);
        chunk.chunk = 1'000'000;
        c.Say(chunk);
      },
      [&](Client& c) {  // one twice
        c.Say(c.Begin(c.arena().shape().payload_bytes() + 10));
        c.Say(c.Chunk(0, 0, c.arena().shape().payload_bytes()));
        c.Say(c.Chunk(0, 1, 10));
      },
      [&](Client& c) {  // out of order
        c.Say(c.Begin(c.arena().shape().payload_bytes() + 10));
        c.Say(c.Chunk(0, 1, 10));
      },
      [&](Client& c) {  // not full
        c.Say(c.Begin(c.arena().shape().payload_bytes() + 10));
        c.Say(c.Chunk(0, 0, 10));
      },
      [&](Client& c) {  // more than was said
        c.Say(c.Begin(10));
        c.Say(c.Chunk(0, 0, 11));
      },
      [&](Client& c) {  // bytes that changed after their header
        c.Say(c.Begin(10));
        const SnapshotMessage chunk = c.Chunk(0, 0, 10);
        c.arena().Payload(0)[3] ^= std::byte{1};
        c.Say(chunk);
      },
      [&](Client& c) {  // another header
        c.Say(c.Begin(10));
        const SnapshotMessage chunk = c.Chunk(0, 0, 10);
        std::memset(c.arena().Payload(0).data() - kArenaPage, 0xff, 64);
        c.Say(chunk);
      },
  };
  for (size_t i = 0; i < scripts.size(); ++i) {
    Client client(directory_.path());
    client.Enter();
    scripts[i](client);
    EXPECT_TRUE(client.IsThrownOut()) << i;
  }
  EXPECT_TRUE(kept().empty());
  {  // another life under the same text
    Client first(directory_.path(), "job");
    first.Enter();
    first.Say(first.Begin(10));
    Client second(directory_.path(), "job");
    second.Enter();
    second.Say(second.Begin(10));
    EXPECT_TRUE(second.IsThrownOut());
  }
  // Others are served as before.
  SnapshotWriter writer({directory_.path(), "run", "other", 0, 1, 2, kLong, {}});
  RankMemory memory({3000});
  ASSERT_TRUE(writer.Save(memory.Save(1, 0)));
  EXPECT_TRUE(writer.WaitDurable(1, kLong));
}

TEST_F(ReceiverTest, ARankThatLeavesBeforeItsEndHasGivenNothing) {
  Start();
  const auto other = Writer(1, 2);
  RankMemory memory({100});
  {
    Client client(directory_.path(), "job");
    client.Say(client.Hello(0, 2, 1000));
    ASSERT_TRUE(client.Hear());
    SnapshotMessage begin = client.Begin(10);
    begin.attempt = NextAttempt(0, 0);
    client.Say(begin);
  }
  ASSERT_TRUE(other->Save(memory.Save(0, 1)));
  EXPECT_FALSE(other->WaitDurable(0, kLong));
  EXPECT_THAT(other->status().last_drop, testing::HasSubstr("rank 0 went away"));
}

// `act` in a process of its own, which is killed then.
pid_t Forked(const std::function<void()>& act) {
  int ready[2];
  if (pipe(ready) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    act();
    if (write(ready[1], "r", 1) != 1) _exit(1);
    for (;;) pause();
  }
  char byte = 0;
  close(ready[1]);
  if (read(ready[0], &byte, 1) != 1) byte = 0;
  close(ready[0]);
  return byte == 'r' ? child : -1;
}

void Kill(pid_t child) {
  int status = 0;
  ASSERT_GT(child, 0);
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, &status, 0), child);
}

TEST_F(ReceiverTest, WhatWaitsForARankThatWasKilledIsDroppedAtOnce) {
  Start();
  const pid_t one = Forked([&] {
    Client client(directory_.path(), "job");
    client.Say(client.Hello(1, 2, 1000));
    client.Hear();
    static_cast<void>(new Client(std::move(client)));  // it is here until the end
  });
  RankMemory memory({100});
  const auto zero = Writer(0, 2);
  ASSERT_TRUE(zero->Save(memory.Save(5, 0)));
  Kill(one);
  EXPECT_FALSE(zero->WaitDurable(5, kLong));
  EXPECT_THAT(zero->status().last_drop, testing::HasSubstr("rank 1's process ended"));
}

// The other ranks are on another machine, as far as anybody knows.
TEST_F(ReceiverTest, WhatDeadProcessesLeftInPartMakesRoomForTheNextLife) {
  if (!kForks) GTEST_SKIP() << "a process with threads is forked";
  Start();
  RankMemory memory({1 << 17});  // a chunk of 1 MiB each: two beside three are more than there are
  const pid_t before = Forked([&] {
    auto* const zero = new SnapshotWriter(
        WriterOptions{directory_.path(), "run", "own:before", 0, 2, 2, kLong, {}});
    if (!zero->Save(memory.Save(5, 0))) _exit(1);
  });
  while (before > 0 && status()["incoming"] == 0) std::this_thread::sleep_for(milliseconds(1));
  Kill(before);
  const auto writer = Writer(0, 1, {}, kLong, 3);
  bool taken = false;
  for (uint64_t step = 6; step < 1000 && !taken;
       ++step) {  // until the kernel says that it has ended
    taken = writer->Save(memory.Save(step, 0));
    if (!taken) std::this_thread::sleep_for(milliseconds(10));
  }
  EXPECT_TRUE(taken) << writer->status().last_drop;
}

TEST_F(ReceiverTest, ARankThatIsRefusedIsToldToTheOthers) {
  Start(kLong, 64, 1 << 20);
  RankMemory small({100}), large({1 << 20});
  const auto zero = Writer(0, 2), one = Writer(1, 2);
  ASSERT_TRUE(zero->Save(small.Save(5, 0)));
  EXPECT_FALSE(one->Save(large.Save(5, 1)));
  EXPECT_FALSE(zero->WaitDurable(5, kLong));
  EXPECT_THAT(zero->status().last_drop, testing::HasSubstr("rank 1: the daemon refuses"));
  // The next one of both is as ever.
  ASSERT_TRUE(zero->Save(small.Save(6, 0)));
  ASSERT_TRUE(one->Save(small.Save(6, 1)));
  EXPECT_TRUE(zero->WaitDurable(6, kLong));
}

TEST_F(ReceiverTest, ARankThatLeavesAfterItsEndHasDoneItsPart) {
  Start();
  RankMemory memory({3000, 5});
  memory.Fill(3);
  const std::string truth = memory.Truth(9, 0, 2);
  {
    const auto writer = Writer(0, 2);
    ASSERT_TRUE(writer->Save(memory.Save(9, 0)));
  }
  const auto other = Writer(1, 2);
  ASSERT_TRUE(other->Save(memory.Save(9, 1)));
  EXPECT_TRUE(other->WaitDurable(9, kLong));
  ASSERT_EQ(kept().size(), 1u);
  EXPECT_EQ(kept()[0].files[0], truth);
}

TEST_F(ReceiverTest, AThousandClientsKeepNobodyOut) {
  Start(kLong, 16);
  for (int round = 0; round < 4; ++round) {
    std::vector<std::unique_ptr<Client>> crowd;
    for (int i = 0; i < 250; ++i) {
      crowd.push_back(std::make_unique<Client>(directory_.path()));
      crowd.back()->Say(crowd.back()->Hello(0, 1, 1000));
    }
    EXPECT_TRUE(crowd.back()->IsThrownOut());
  }
  const auto writer = Writer();
  RankMemory memory({3000});
  bool taken = false;
  for (uint64_t step = 0; step < 1000 && !taken; ++step) taken = writer->Save(memory.Save(step, 0));
  EXPECT_TRUE(taken);
}

}  // namespace
}  // namespace ckptfs
