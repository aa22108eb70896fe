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

// A process may grow by so much in noise; a sanitizer keeps freed memory, per thread.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kNoise = uint64_t{64} << 20;
#else
constexpr uint64_t kNoise = uint64_t{4} << 20;
#endif

// A thousand saves, each followed by an update: memory, arena and descriptors stay as they
// were after the first hundred.
TEST_F(HostileClientTest, AThousandSnapshotsLeaveNothing) {
  ReceiverOptions options;
  options.store = directory_.path();
  options.memory_bytes = 4 << 20;
  options.chunk_bytes = testing_support::kSmallChunk;
  options.keep = [](const ReceivedStep&) { return Status(); };
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
  const auto said = nlohmann::json::parse(receiver->StatusJson());
  EXPECT_EQ(said["durable"], 1000);
  EXPECT_LE(said["arena_bytes"].get<uint64_t>(), 2 * 5 * testing_support::kSmallChunk);
}

}  // namespace
}  // namespace ckptfs
