// SPDX-License-Identifier: Apache-2.0
//
// Ranks that come back to another daemon with the arena of the last one, and strangers who
// come with what is not one.  kill_test.cc has the daemons that die.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <future>
#include <thread>

#include "core/base/runtime_directory.h"
#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using std::chrono::milliseconds;
using testing_support::Client;
using testing_support::kLong;
using testing_support::kSmallChunk;
using testing_support::RankMemory;
using testing_support::ReceiverTest;

constexpr ArenaShape kShape{kSmallChunk, 16};

// A daemon that says what the test likes.
class FakeDaemon {
 public:
  explicit FakeDaemon(const std::string& store) : path_(*SnapshotSocketPath(store, true)) {
    unlink(path_.c_str());
    const sockaddr_un address = *SocketAddress(path_);
    listener_ = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address),
              0);
    EXPECT_EQ(listen(listener_.get(), 10), 0);
  }
  ~FakeDaemon() {
    unlink(path_.c_str());
    if (serving_.joinable()) serving_.join();
  }
  // Gives the next rank an arena, hears it until `last`, and goes away.
  void Serve(SnapshotWord last) {
    serving_ = std::thread([this, last] {
      const Descriptor rank(accept(listener_.get(), nullptr, nullptr));
      listener_ = Descriptor();
      (void)*ReceiveSnapshotMessage(rank.get());
      const auto memory = *MakeArena(kShape);
      SnapshotMessage welcome{SnapshotWord::kWelcome};
      welcome.length = kShape.chunk_bytes;
      welcome.sequence = kShape.chunks;
      (void)SendSnapshotMessage(rank.get(), welcome, memory.descriptor.get());
      while (true) {
        const auto heard = ReceiveSnapshotMessage(rank.get());
        if (!heard || heard->kind != Incoming::Kind::kMessage || heard->message.word == last)
          return;
      }
    });
  }
  // Gives the next rank an arena, and hears nothing of it until `gate`; then all until `last`
  // drops.  Returns how many there were.
  std::future<size_t> ServeLate(std::shared_future<void> gate, size_t last) {
    return std::async(std::launch::async, [this, gate, last] {
      const Descriptor rank(accept(listener_.get(), nullptr, nullptr));
      (void)*ReceiveSnapshotMessage(rank.get());
      const auto memory = *MakeArena(kShape);
      SnapshotMessage welcome{SnapshotWord::kWelcome};
      welcome.length = kShape.chunk_bytes;
      welcome.sequence = kShape.chunks;
      (void)SendSnapshotMessage(rank.get(), welcome, memory.descriptor.get());
      gate.wait();
      size_t drops = 0;
      while (drops < last) {
        const auto heard = ReceiveSnapshotMessage(rank.get());
        if (!heard || heard->kind != Incoming::Kind::kMessage) break;
        drops += heard->message.word == SnapshotWord::kDrop ? 1 : 0;
      }
      return drops;
    });
  }
  // Refuses the next rank, for good or for now.
  void RefuseOne(bool for_now) const {
    const Descriptor rank(accept(listener_.get(), nullptr, nullptr));
    (void)*ReceiveSnapshotMessage(rank.get());
    SnapshotMessage refused{SnapshotWord::kRefused};
    refused.sequence = for_now ? 1 : 0;
    (void)SendSnapshotMessage(rank.get(), refused);
  }
  // The next rank, which hears nothing.
  Descriptor Guest() const { return Descriptor(accept(listener_.get(), nullptr, nullptr)); }
  // How many ranks came to a daemon that serves nobody.
  size_t Unserved() const {
    fcntl(listener_.get(), F_SETFL, O_NONBLOCK);
    size_t count = 0;
    while (Descriptor(accept(listener_.get(), nullptr, nullptr)).valid()) ++count;
    return count;
  }

 private:
  const std::string path_;
  Descriptor listener_;
  std::thread serving_;
};

class ReturnTest : public ReceiverTest {
 protected:
  // A writer whose daemon has gone with its first step.
  std::unique_ptr<SnapshotWriter> Deserted(SnapshotWord last, milliseconds limit = kLong) {
    memory_.Fill(7);
    WriterOptions options{directory_.path(), "run", "job", 0, 1, 2, kLong, {}};
    options.away_limit = limit;
    auto writer = std::make_unique<SnapshotWriter>(std::move(options));
    FakeDaemon daemon(directory_.path());
    daemon.Serve(last);
    EXPECT_TRUE(writer->Save(memory_.Save(7, 0))) << writer->status().last_drop;
    return writer;
  }
  RankMemory memory_{{1500, 5, 1000}};
};

TEST_F(ReturnTest, WhatWasHandedOverGoesToTheNextDaemon) {
  for (const SnapshotWord last : {SnapshotWord::kBegin, SnapshotWord::kChunk, SnapshotWord::kEnd}) {
    const auto writer = Deserted(last);
    writer->WaitBeforeUpdate();
    const std::string truth = memory_.Truth(7, 0, 1);
    memory_.Fill(99);
    while (writer->status().connected) std::this_thread::yield();
    EXPECT_FALSE(writer->Save(memory_.Save(8, 0)));  // nobody has it
    Start();
    EXPECT_TRUE(writer->WaitDurable(7, kLong)) << writer->status().last_drop;
    ASSERT_EQ(kept().size(), 1u);
    EXPECT_TRUE(kept()[0].files[0] == truth);
    // The arena is as good as before.
    for (uint64_t step = 9; step < 30; ++step) {
      memory_.Fill(static_cast<unsigned char>(step));
      ASSERT_TRUE(writer->Save(memory_.Save(step, 0))) << writer->status().last_drop;
      ASSERT_TRUE(writer->WaitDurable(step, kLong)) << writer->status().last_drop;
      ASSERT_TRUE(kept().back().files[0] == memory_.Truth(step, 0, 1));
    }
    EXPECT_EQ(status()["arena_bytes"], kShape.bytes());
    EXPECT_EQ(writer->status().dropped, 1u);
    EXPECT_EQ(writer->TakeLog().size(), 2u);  // it went away; nobody was there for 8
    receiver_.reset();
    kept_.clear();
  }
}

// One that is stopped after its welcome: its socket fills, and training goes on.
TEST_F(ReturnTest, ADaemonThatDoesNotReadIsNotWaitedFor) {
  constexpr size_t kDrops = 1000;  // more than a socket takes
  FakeDaemon daemon(directory_.path());
  std::promise<void> gate;
  auto drops = daemon.ServeLate(gate.get_future().share(), kDrops);
  WriterOptions options{directory_.path(), "run", "job", 0, 1, 2, kLong, {}};
  SnapshotWriter writer(std::move(options));
  memory_.Fill(7);
  ASSERT_TRUE(writer.Save(memory_.Save(0, 0))) << writer.status().last_drop;
  writer.WaitBeforeUpdate();
  for (uint64_t step = 1; step <= kDrops; ++step) writer.Drop(step, "there is nothing to save");
  EXPECT_TRUE(writer.status().connected);
  gate.set_value();
  EXPECT_EQ(drops.get(), kDrops);  // all of them are said to it
}

// One that is stopped: its socket is there.
TEST_F(ReturnTest, ADaemonThatDoesNotAnswerIsAskedRarely) {
  WriterOptions options{directory_.path(), "run", "job", 0, 1, 2, kLong, {}};
  options.welcome_limit = milliseconds(2'000);
  SnapshotWriter writer(std::move(options));
  const FakeDaemon stopped(directory_.path());
  for (uint64_t step = 1; step <= 9; ++step) EXPECT_FALSE(writer.Save(memory_.Save(step, 0)));
  EXPECT_EQ(stopped.Unserved(), 1u);
  EXPECT_EQ(writer.TakeLog().size(), 2u);  // one of the first, one of the others
}

// A save that asks whether it goes on; the second time it does not.
Capture Interrupted(Capture capture, int& asked) {
  capture.interrupted = [&asked] { return ++asked == 2; };
  return capture;
}

TEST_F(ReturnTest, WhoIsInterruptedDoesNotWaitForADaemon) {
  memory_.Fill(7);
  const FakeDaemon silent(directory_.path());
  SnapshotWriter writer({directory_.path(), "run", "job", 0, 1, 2, kLong, {}});
  for (uint64_t step = 1; step < 3; ++step) {  // it is asked again
    int asked = 0;
    EXPECT_FALSE(writer.Save(Interrupted(memory_.Save(step, 0), asked)));
    EXPECT_EQ(asked, 2);
    EXPECT_EQ(writer.status().last_drop, StrCat("step ", step, ": interrupted"));
  }
}

// Nor while the link's own thread hands the arena to one that does not answer.
TEST_F(ReturnTest, WhoIsInterruptedDoesNotWaitForAnotherDaemon) {
  const auto writer = Deserted(SnapshotWord::kEnd);
  while (writer->status().connected) std::this_thread::yield();
  const FakeDaemon silent(directory_.path());
  const Descriptor guest = silent.Guest();
  for (uint64_t step = 8; step < 10; ++step) {
    int asked = 0;
    EXPECT_FALSE(writer->Save(Interrupted(memory_.Save(step, 0), asked)));
    EXPECT_EQ(asked, 2);
    EXPECT_EQ(writer->status().last_drop, StrCat("step ", step, ": interrupted"));
  }
}

TEST_F(ReturnTest, NobodyWaitsForEver) {
  const auto writer = Deserted(SnapshotWord::kEnd, milliseconds(20));
  EXPECT_FALSE(writer->WaitDurable(7, kLong));
  EXPECT_EQ(writer->status().last_drop, "step 7: the daemon went away");
  Start();
  EXPECT_TRUE(writer->Save(memory_.Save(8, 0)));
  EXPECT_TRUE(writer->WaitDurable(8, kLong));
}

TEST_F(ReturnTest, WhoMayNotComeBackGivesUp) {
  const auto writer = Deserted(SnapshotWord::kEnd);
  {
    const FakeDaemon other(directory_.path());
    other.RefuseOne(true);
    other.RefuseOne(true);
    EXPECT_EQ(writer->status().under_way, 1u);
    other.RefuseOne(false);
    EXPECT_FALSE(writer->WaitDurable(7, kLong));
  }
  Start();
  EXPECT_TRUE(writer->Save(memory_.Save(8, 0)));
  EXPECT_TRUE(writer->WaitDurable(8, kLong));
}

TEST_F(ReturnTest, WhoClosesDoesNotWaitForAnotherDaemon) {
  const auto writer = Deserted(SnapshotWord::kEnd);
  writer->Close();
}

TEST_F(ReturnTest, WhatIsDroppedMeanwhileIsNotSaidAgain) {
  const auto writer = Deserted(SnapshotWord::kBegin);
  writer->WaitBeforeUpdate();
  while (writer->status().connected) std::this_thread::yield();
  writer->Drop(8, "a whim");
  Start();
  EXPECT_TRUE(writer->WaitDurable(7, kLong));
  EXPECT_FALSE(writer->WaitDurable(8, kLong));
  EXPECT_EQ(kept().size(), 1u);
}

// ---- Strangers ----------------------------------------------------------------------

TEST_F(ReturnTest, AnArenaOfBeforeIsAnArena) {
  Start();
  Client client(directory_.path());
  const ArenaMemory memory = *MakeArena(kShape);
  client.Return(memory.descriptor, kShape);
  EXPECT_EQ(client.Hear()->word, SnapshotWord::kWelcome);
  EXPECT_FALSE(client.memory().valid());
  SnapshotMessage begin = client.Begin(10);
  begin.chunk = 1;
  client.Say(begin);
  client.Say(client.Chunk(3, 0, 10));
  SnapshotMessage end{SnapshotWord::kEnd};
  end.attempt = 1;
  client.Say(end);
  while (true) {
    const auto heard = client.Hear();
    ASSERT_TRUE(heard);
    if (heard->word == SnapshotWord::kDurable) break;
  }
  EXPECT_EQ(kept().at(0).files.at(0), std::string(10, '\0'));
}

// A ledger's first attempt was over, and the rank has used its chunks for the second.
TEST_F(ReturnTest, WhoSpeaksForAnotherLosesOneAttemptOnly) {
  Start();
  Client client(directory_.path());
  const ArenaMemory memory = *MakeArena(kShape);
  client.Return(memory.descriptor, kShape, 0, 1, true);
  ASSERT_EQ(client.Hear()->word, SnapshotWord::kWelcome);
  ChunkHeader header;
  header.stream = client.Stream();
  header.attempt = 2;
  header.length = 10;
  client.arena().WriteHeader(3, header);
  for (const uint64_t attempt : {1, 2}) {
    for (const SnapshotWord word :
         {SnapshotWord::kBegin, SnapshotWord::kChunk, SnapshotWord::kEnd}) {
      SnapshotMessage message{word};
      message.attempt = attempt;
      message.chunk = word == SnapshotWord::kChunk ? 3 : 1;
      message.length = 10;
      client.Say(message);
    }
  }
  auto heard = client.Hear();
  while (heard && heard->word == SnapshotWord::kFree) heard = client.Hear();
  ASSERT_TRUE(heard);
  EXPECT_EQ(heard->word, SnapshotWord::kDurable) << heard->text;
  EXPECT_EQ(heard->attempt, 2u);
  EXPECT_EQ(kept().size(), 1u);
}

TEST_F(ReturnTest, BytesThatChangedSinceAreRefused) {
  Start();
  Client client(directory_.path());
  const ArenaMemory memory = *MakeArena(kShape);
  client.Return(memory.descriptor, kShape);
  ASSERT_EQ(client.Hear()->word, SnapshotWord::kWelcome);
  client.Say(client.Begin(10));
  const SnapshotMessage chunk = client.Chunk(0, 0, 10);
  client.arena().Payload(0)[9] = std::byte{1};
  client.Say(chunk);
  EXPECT_TRUE(client.IsThrownOut());
  EXPECT_TRUE(kept().empty());
}

Descriptor MemoryFile(uint64_t bytes, unsigned flags, int seals) {
  Descriptor memory(memfd_create("test", MFD_CLOEXEC | flags));
  if (memory.valid() && (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 ||
                         (seals != 0 && fcntl(memory.get(), F_ADD_SEALS, seals) != 0))) {
    ADD_FAILURE() << strerror(errno);
  }
  return memory;
}

TEST_F(ReturnTest, WhatIsNotAnArenaIsRefused) {
  Start();
  constexpr int kSealed = F_SEAL_SHRINK | F_SEAL_GROW;
  struct Case {
    std::string_view what;
    Descriptor memory;
    ArenaShape shape;
  };
  std::vector<Case> cases;
  cases.push_back({"nothing", Descriptor(), kShape});
  cases.push_back({"not memory", Descriptor(open("/dev/zero", O_RDWR | O_CLOEXEC)), kShape});
  cases.push_back({"a file",
                   Descriptor(open(StrCat(directory_.path(), "/f").c_str(),
                                   O_RDWR | O_CREAT | O_CLOEXEC, 0600)),
                   kShape});
  EXPECT_EQ(ftruncate(cases.back().memory.get(), static_cast<off_t>(kShape.bytes())), 0);
  cases.push_back(
      {"can shrink", MemoryFile(kShape.bytes(), MFD_ALLOW_SEALING, F_SEAL_GROW), kShape});
  cases.push_back(
      {"can grow", MemoryFile(kShape.bytes(), MFD_ALLOW_SEALING, F_SEAL_SHRINK), kShape});
  cases.push_back(
      {"too short", MemoryFile(kShape.bytes() - 1, MFD_ALLOW_SEALING, kSealed), kShape});
  cases.push_back({"too long", MemoryFile(kShape.bytes() + 1, MFD_ALLOW_SEALING, kSealed), kShape});
  for (const ArenaShape shape :
       {ArenaShape{kSmallChunk, 0}, ArenaShape{0, 16}, ArenaShape{kSmallChunk + 1, 16},
        ArenaShape{uint64_t{1} << 40, 4}, ArenaShape{uint64_t{1} << 30, ~0u}}) {
    cases.push_back({"no shape", MemoryFile(kShape.bytes(), MFD_ALLOW_SEALING, kSealed), shape});
  }
  // Huge pages may be missing when they are read.
  constexpr uint64_t kHuge = uint64_t{2} << 20;
  Descriptor huge = MemoryFile(kHuge, MFD_ALLOW_SEALING | MFD_HUGETLB, kSealed);
  if (huge.valid()) cases.push_back({"huge", std::move(huge), {kHuge / 2, 2}});
  if (geteuid() == 0) {
    cases.push_back({"another's", MemoryFile(kShape.bytes(), MFD_ALLOW_SEALING, kSealed), kShape});
    EXPECT_EQ(fchown(cases.back().memory.get(), 65534, 65534), 0);
  }
  for (const Case& one : cases) {
    Client client(directory_.path());
    client.Return(one.memory, one.shape);
    EXPECT_TRUE(client.IsThrownOut()) << one.what;
    EXPECT_EQ(status()["arena_bytes"], 0) << one.what;
  }
}

TEST_F(ReturnTest, AGreetingIsSaidOnceAndMemoryHasItsLimit) {
  Start(kLong, 64, kShape.bytes());
  const ArenaMemory one = *MakeArena(kShape), two = *MakeArena(kShape);
  Client first(directory_.path());
  first.Return(one.descriptor, kShape);
  ASSERT_EQ(first.Hear()->word, SnapshotWord::kWelcome);
  Client second(directory_.path());
  second.Return(two.descriptor, kShape);
  EXPECT_TRUE(second.IsThrownOut());
  first.Return(two.descriptor, kShape);
  EXPECT_TRUE(first.IsThrownOut());
  while (status()["arena_bytes"] != 0) std::this_thread::yield();
}

// With two readers, one would read bytes that the rank writes for the other.
TEST_F(ReturnTest, AnArenaThatIsStillReadIsRefusedForNow) {
  Start();
  const ArenaMemory memory = *MakeArena(kShape);
  auto first = std::make_unique<Client>(directory_.path());
  first->Return(memory.descriptor, kShape);
  ASSERT_EQ(first->Hear()->word, SnapshotWord::kWelcome);
  {
    Client second(directory_.path());
    second.Return(memory.descriptor, kShape);
    const auto answer = second.Hear();
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->word, SnapshotWord::kRefused);
    EXPECT_EQ(answer->sequence, 1u);
  }
  first.reset();
  while (true) {
    Client third(directory_.path());
    third.Return(memory.descriptor, kShape);
    if (third.Hear()->word == SnapshotWord::kWelcome) break;
  }
}

// A rank of two heard that the step is durable, the other one did not, and the first has gone.
TEST_F(ReturnTest, APartOfAStepThatIsStoredIsDurableAlone) {
  for (const bool stored : {true, false}) {
    Start(stored ? kLong : milliseconds(20));
    stored_ = stored;
    const ArenaMemory memory = *MakeArena(kShape);
    Client client(directory_.path());
    client.Return(memory.descriptor, kShape, 1, 2);
    ASSERT_EQ(client.Hear()->word, SnapshotWord::kWelcome);
    SnapshotMessage begin = client.Begin(10);
    begin.chunk = 1;
    client.Say(begin);
    ChunkHeader header;
    header.rank = 1;
    header.stream = client.Stream();
    header.attempt = 1;
    header.length = 10;
    client.arena().WriteHeader(0, header);
    SnapshotMessage chunk{SnapshotWord::kChunk};
    chunk.attempt = 1;
    client.Say(chunk);
    SnapshotMessage end{SnapshotWord::kEnd};
    end.attempt = 1;
    client.Say(end);
    auto heard = client.Hear();
    while (heard && heard->word == SnapshotWord::kFree) heard = client.Hear();
    ASSERT_TRUE(heard);
    EXPECT_EQ(heard->word, stored ? SnapshotWord::kDurable : SnapshotWord::kDropped) << heard->text;
    while (status()["incoming"] != 0) std::this_thread::yield();  // once it has told the rank
    receiver_.reset();
  }
}

// It asks what became of a save of which it has nothing to hand over any more.
TEST_F(ReturnTest, AStoreThatCannotBeAskedSaysNothingOfASave) {
  failing_looks_ = 2;
  stored_ = true;
  Start();
  Client client(directory_.path());
  client.Enter();
  SnapshotMessage ask{SnapshotWord::kAsk};
  ask.step = 1;
  ask.attempt = 128;
  ask.text = "nowhere";
  client.Say(ask);
  const auto answer = client.Hear();
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->word, SnapshotWord::kDurable) << answer->text;
  EXPECT_EQ(looks_, 3u);
}

// Somebody else (a process that was forked) may have the descriptor for ever.
TEST_F(ReturnTest, TheMemoryOfARankThatLeftIsFreed) {
  Start();
  auto client = std::make_unique<Client>(directory_.path());
  client->Enter();
  const Descriptor memory(dup(client->memory().get()));
  struct stat info;
  ASSERT_EQ(fstat(memory.get(), &info), 0);
  EXPECT_GT(info.st_blocks, 0);
  client.reset();
  while (fstat(memory.get(), &info) == 0 && info.st_blocks != 0) std::this_thread::yield();
}

}  // namespace
}  // namespace ckptfs
