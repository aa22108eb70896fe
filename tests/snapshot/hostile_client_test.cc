// SPDX-License-Identifier: Apache-2.0
//
// Clients that are somebody else's, or send what nobody asked for; and a thousand
// snapshots, after which nothing is left.  receiver_test.cc has those that break the
// protocol.
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "tests/snapshot/receiving.h"

namespace ckptfs {
namespace {

using testing_support::Client;
using testing_support::kLong;
using testing_support::RankMemory;
using testing_support::ReceiverTest;

class HostileClientTest : public ReceiverTest {
 protected:
  static size_t Descriptors() {
    size_t count = 0;
    DIR* directory = opendir("/proc/self/fd");
    while (readdir(directory) != nullptr) ++count;
    closedir(directory);
    return count;
  }
  static uint64_t ResidentBytes() {
    std::ifstream statm("/proc/self/statm");
    uint64_t pages = 0;
    statm >> pages >> pages;
    return pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  }
  void ExpectService() {
    const auto writer = std::make_unique<SnapshotWriter>(
        WriterOptions{directory_.path(), "run", "service", 0, 1, 1, kLong, {}});
    RankMemory memory({100});
    EXPECT_TRUE(writer->Save(memory.Save(1, 0))) << writer->status().last_drop;
    EXPECT_TRUE(writer->WaitDurable(1, kLong));
  }
};

// Returns the answer to user 65534, after somebody opened the way to the socket.
std::string SaidToNobody(const std::string& path) {
  const Descriptor way(open(path.c_str(), O_PATH | O_CLOEXEC));
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d", way.get());
    const int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    std::string text = "cannot become another";
    if (setgid(65534) == 0 && setuid(65534) == 0) {
      text = "cannot connect";
      if (connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
        const auto heard = ReceiveSnapshotMessage(connection, true);
        const bool refused = heard && heard->kind == Incoming::Kind::kMessage &&
                             heard->message.word == SnapshotWord::kRefused;
        text = refused ? heard->message.text : "served";
      }
    }
    _exit(write(ends[1], text.data(), text.size()) < 0 ? 1 : 0);
  }
  close(ends[1]);
  std::string said(1000, '\0');
  said.resize(static_cast<size_t>(std::max<ssize_t>(0, read(ends[0], said.data(), said.size()))));
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return said;
}

TEST_F(HostileClientTest, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Start();
  const std::string path = *SnapshotSocketPath(directory_.path(), false);
  EXPECT_EQ(SaidToNobody(path), "cannot connect");
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_THAT(SaidToNobody(path), testing::HasSubstr("only from its own user and root"));
  ExpectService();
}

// As many as a message can carry, with every message.
TEST_F(HostileClientTest, AFloodOfDescriptorsIsClosed) {
  Start();
  const Descriptor socket = *ConnectForSnapshots(directory_.path());
  const size_t before = Descriptors();
  constexpr size_t kMany = 250;
  union {
    cmsghdr header;
    char bytes[CMSG_SPACE(kMany * sizeof(int))];
  } control{};
  control.header.cmsg_level = SOL_SOCKET;
  control.header.cmsg_type = SCM_RIGHTS;
  control.header.cmsg_len = CMSG_LEN(kMany * sizeof(int));
  const int fd = STDIN_FILENO;
  for (size_t i = 0; i < kMany; ++i) {
    std::memcpy(CMSG_DATA(&control.header) + i * sizeof fd, &fd, sizeof fd);
  }
  char text[] = "not a message";
  iovec part{text, sizeof text};
  msghdr out{};
  out.msg_iov = &part;
  out.msg_iovlen = 1;
  out.msg_control = control.bytes;
  out.msg_controllen = sizeof control.bytes;
  for (int i = 0; i < 50 && sendmsg(socket.get(), &out, MSG_NOSIGNAL) >= 0; ++i) {
  }
  ExpectService();  // after which the flood was heard
  while (status()["ranks"] != 0) std::this_thread::yield();
  EXPECT_LE(Descriptors(), before + 8);  // some of the rank that was served, none of 250 a message
}

TEST_F(HostileClientTest, WhatIsConnectedAndSaysNothingHasNoMemory) {
  Start();
  std::vector<Descriptor> silent;
  for (int i = 0; i < 50; ++i) silent.push_back(*ConnectForSnapshots(directory_.path()));
  ExpectService();
  while (status()["ranks"] != 50) std::this_thread::yield();
  EXPECT_EQ(status()["arena_bytes"], 0);
}

// As many as keep everybody else out today.
TEST_F(HostileClientTest, ClientsThatSayNothingAreSentAway) {
  hello_ = std::chrono::milliseconds(0);
  Start();
  std::vector<Descriptor> silent;
  for (int i = 0; i < 700; ++i) silent.push_back(*ConnectForSnapshots(directory_.path()));
  ExpectService();
  EXPECT_LE(status()["ranks"], 257) << "of those who said no hello";
  while (status()["ranks"] != 0) std::this_thread::yield();  // when their time is over
  ExpectService();
}

TEST_F(HostileClientTest, AHelloWithTwoDescriptorsLeavesNone) {
  Start();
  ExpectService();
  while (status()["ranks"] != 0) std::this_thread::yield();
  const size_t before = Descriptors();
  const Descriptor sent(open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const SnapshotWord word :
       {SnapshotWord::kHello, SnapshotWord::kReturn, SnapshotWord::kBegin}) {
    Client client(directory_.path());
    SnapshotMessage message = client.Hello(0, 1, 1000);
    message.word = word;
    std::string bytes = EncodeSnapshotMessage(message);
    union {
      cmsghdr header;
      char room[CMSG_SPACE(2 * sizeof(int))];
    } control{};
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(2 * sizeof(int));
    const int both[] = {sent.get(), sent.get()};
    std::memcpy(CMSG_DATA(&control.header), both, sizeof both);
    iovec part{bytes.data(), bytes.size()};
    msghdr out{};
    out.msg_iov = &part;
    out.msg_iovlen = 1;
    out.msg_control = control.room;
    out.msg_controllen = sizeof control.room;
    ASSERT_GT(sendmsg(client.socket(), &out, MSG_NOSIGNAL), 0);
    EXPECT_TRUE(client.IsThrownOut());
  }
  while (status()["ranks"] != 0) std::this_thread::yield();
  EXPECT_EQ(Descriptors(), before + 1);
}

// Each time that it leaves the daemon looks whether it has ended: by one descriptor.
TEST_F(HostileClientTest, AProcessThatComesOftenLeavesOneDescriptor) {
  Start();
  ExpectService();
  while (status()["ranks"] != 0) std::this_thread::yield();
  const size_t before = Descriptors();
  for (int i = 0; i < 50; ++i) {
    Client client(directory_.path());
    client.Enter(1000);
  }
  while (status()["ranks"] != 0) std::this_thread::yield();
  EXPECT_LE(Descriptors(), before + 1);
}

SnapshotMessage AskAbout(uint64_t step) {
  SnapshotMessage ask{SnapshotWord::kAsk};
  ask.step = step;
  ask.attempt = step * 64 + 64;
  ask.text = "nowhere";
  return ask;
}

// Each look takes 10 ms, and there are 200 to be done: a save does not wait for them.
TEST_F(HostileClientTest, SavesComeBetweenQuestions) {
  look_ = std::chrono::milliseconds(10);
  Start();
  Client client(directory_.path());
  client.Enter();
  for (uint64_t step = 1; step <= 200; ++step) client.Say(AskAbout(step));
  ExpectService();
  EXPECT_LT(looks_, 60u);
}

// Each is told once, in turn.
TEST_F(HostileClientTest, AllQuestionsAreAnswered) {
  Start();
  Client client(directory_.path());
  client.Enter();
  for (uint64_t step = 1; step <= 100; ++step) client.Say(AskAbout(step));
  for (uint64_t step = 1; step <= 100; ++step) {
    const auto answer = client.Hear();
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->word, SnapshotWord::kDropped);
    EXPECT_EQ(answer->step, step);
  }
}

// It asks and never reads: what it says is left in the socket, and nobody looks for it.
TEST_F(HostileClientTest, WhoLeavesAnswersUnreadIsNotHeard) {
  Start();
  Client client(directory_.path());
  client.Enter();
  uint64_t step = 0;
  int full = 0;
  while (full < 20) {
    const bool sent =
        SendSnapshotMessage(client.socket(), AskAbout(++step), -1, Full::kFail).has_value();
    full = sent ? 0 : full + 1;
    if (!sent) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_LT(looks_, 5000u);
  ExpectService();
  while (status()["ranks"] > 1) std::this_thread::yield();  // who was served leaves
  EXPECT_EQ(status()["ranks"], 1) << "it may read later";
}

// It is told what others of its job do, too; it is sent away once that is too much.
TEST_F(HostileClientTest, WhoNeverReadsWhatOthersDoIsSentAway) {
  Start();
  Client idle(directory_.path(), "job"), busy(directory_.path(), "job");
  for (const auto& [client, rank] : {std::pair(&idle, 0u), std::pair(&busy, 1u)}) {
    client->Say(client->Hello(rank, 2, 1000));
    ASSERT_EQ(client->Hear()->word, SnapshotWord::kWelcome);
  }
  for (uint64_t step = 1; step <= 4400; ++step) {
    SnapshotMessage drop{SnapshotWord::kDrop};
    drop.step = step;
    drop.attempt = step * 64 + 64;
    busy.Say(drop);
    const auto told = busy.Hear();
    ASSERT_TRUE(told && told->word == SnapshotWord::kDropped) << step;
  }
  EXPECT_TRUE(idle.IsThrownOut());
  ExpectService();
}

// The arena of a client that left while it was made, or after, is gone soon.
TEST_F(HostileClientTest, AnArenaThatNobodyWaitsForGoes) {
  Start(kLong, 64, uint64_t{100} << 20);
  for (int i = 0; i < 6; ++i) {
    Client client(directory_.path());
    client.Say(client.Hello(0, 1, uint64_t{40} << 20));
    if (i % 2 == 0) client.Hear();  // its welcome
  }
  // The next one waits for the memory of those before; it is not refused.
  Client last(directory_.path());
  last.Say(last.Hello(0, 1, uint64_t{40} << 20));
  const auto welcome = last.Hear();
  ASSERT_TRUE(welcome);
  EXPECT_EQ(welcome->word, SnapshotWord::kWelcome) << welcome->text;
}

TEST_F(HostileClientTest, TheDaemonMayEndWhileAnArenaIsMade) {
  for (int i = 0; i < 5; ++i) {
    Start(kLong, 64, uint64_t{1} << 30);
    Client client(directory_.path());
    client.Say(client.Hello(0, 1, uint64_t{400} << 20));
    while (status()["arena_bytes"] == 0) std::this_thread::yield();
    receiver_.reset();
  }
}

// A process may grow by so much in noise; a sanitizer keeps what was freed, per thread.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kNoise = uint64_t{64} << 20;
#else
constexpr uint64_t kNoise = uint64_t{4} << 20;
#endif

// A thousand saves, each followed by an update: memory, arena and descriptors stay as they
// were after the first hundred.
TEST_F(HostileClientTest, AThousandSnapshotsLeaveNothing) {
  ReceiverOptions options = Options();
  steps_.keep = [](const SaveBytes&) { return Status(); };
  const auto receiver = *Receiver::Start(std::move(options));
  const auto writer = Writer();
  RankMemory memory({3000, 20, 1000});
  uint64_t resident = 0;
  size_t descriptors = 0;
  for (uint64_t step = 0; step < 1000; ++step) {
    ASSERT_TRUE(writer->Save(memory.Save(step, 0))) << writer->status().last_drop;
    writer->WaitBeforeUpdate();
    ASSERT_TRUE(writer->WaitDurable(step, kLong));
    if (step != 100) continue;
    resident = ResidentBytes();
    descriptors = Descriptors();
  }
  EXPECT_LT(ResidentBytes(), resident + kNoise);
  EXPECT_EQ(Descriptors(), descriptors);
  const nlohmann::json said = ToJson(receiver->status());
  EXPECT_EQ(said["durable"], 1000);
  EXPECT_LE(said["arena_bytes"].get<uint64_t>(), 2 * 5 * testing_support::kSmallChunk);
}

}  // namespace
}  // namespace ckptfs
