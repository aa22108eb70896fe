// SPDX-License-Identifier: Apache-2.0
#include "snapshot/wire/protocol.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace ckptfs {
namespace {

struct Pair {
  explicit Pair(int flags = 0) {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0, ends), 0);
    a = Descriptor(ends[0]);
    b = Descriptor(ends[1]);
  }
  void SendRaw(const std::string& bytes) const {
    ASSERT_EQ(send(a.get(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }
  Descriptor a, b;
};

SnapshotMessage Sample() {
  SnapshotMessage message{SnapshotWord::kBegin};
  message.rank = 1;
  message.world = 2;
  message.step = 3;
  message.attempt = 4;
  message.sequence = 5;
  message.chunk = 6;
  message.length = 7;
  message.text = "why\nnot";
  return message;
}

// The bytes of the sample, as they are sent.
std::string Bytes() {
  Pair pair;
  EXPECT_TRUE(SendSnapshotMessage(pair.a.get(), Sample()));
  std::string bytes(4096, '\0');
  bytes.resize(static_cast<size_t>(recv(pair.b.get(), bytes.data(), bytes.size(), 0)));
  return bytes;
}

size_t OpenDescriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    count += entry.path().empty() ? 0 : 1;
  }
  return count;
}

TEST(SnapshotProtocolTest, RanksThatMissASaveAreTogetherAtTheNext) {
  const auto after = [](std::initializer_list<uint64_t> steps) {
    uint64_t last = 0;
    for (const uint64_t step : steps) {
      const uint64_t next = NextAttempt(last, step);
      EXPECT_GT(next, last) << step;
      const auto known = AttemptsOf(TurnOf(next), step);
      EXPECT_TRUE(std::ranges::binary_search(known, next)) << step;
      last = next;
    }
    return last;
  };
  EXPECT_EQ(after({0, 10, 20, 30}), after({0, 20, 30}));
  EXPECT_EQ(after({10, 20, 30}), after({30}));
  EXPECT_NE(after({10, 20, 10}), after({10})) << "another save of that step";
  EXPECT_EQ(after({10, 20, 30, 5, 6}), after({10, 30, 6}));
  EXPECT_NE(after({7, 7}), after({7}));
  EXPECT_EQ(after({7, 7, 7, 8}), after({7, 8})) << "one tried again alone";
  EXPECT_EQ(after({7, 7, 7, 7, 7, 7, 7, 7, 7, 8}), after({7, 8}));
  EXPECT_EQ(TurnOf(after({7, 7, 7, 8})), 0u);
  EXPECT_EQ(TurnOf(after({7, 6, 5})), 2u);
  const auto again = [](int times, uint64_t then) {
    uint64_t last = 0;
    for (int i = 0; i < times; ++i) last = NextAttempt(last, 7);
    return NextAttempt(last, then);
  };
  EXPECT_EQ(again(64, 8), after({8}));
  EXPECT_NE(again(65, 8), after({8})) << "it needs a turn of its own";
  EXPECT_EQ(NextAttempt(InTurnOf(again(65, 8), after({7})), 9), NextAttempt(again(65, 8), 9));
  EXPECT_EQ(InTurnOf(after({7}), again(65, 8)), again(65, 8)) << "it is in a later one";
  constexpr uint64_t kLast = UINT64_MAX;  // steps that are clocks, say, are counted
  EXPECT_EQ(after({kLast - 2, kLast - 1, kLast}), after({kLast, kLast, kLast}));
}

TEST(SnapshotProtocolTest, MessagesArriveAsTheyWereSent) {
  Pair pair;
  ASSERT_TRUE(SendSnapshotMessage(pair.a.get(), Sample()));
  const auto got = ReceiveSnapshotMessage(pair.b.get());
  ASSERT_TRUE(got && got->kind == Incoming::Kind::kMessage);
  const SnapshotMessage& message = got->message;
  EXPECT_EQ(message.word, SnapshotWord::kBegin);
  EXPECT_EQ(message.rank + message.world, 3u);
  EXPECT_EQ(message.step, 3u);
  EXPECT_EQ(message.attempt, 4u);
  EXPECT_EQ(message.sequence, 5u);
  EXPECT_EQ(message.chunk, 6u);
  EXPECT_EQ(message.length, 7u);
  EXPECT_EQ(message.text, "why\nnot");
}

TEST(SnapshotProtocolTest, LongTextsAreCut) {
  Pair pair;
  SnapshotMessage message{SnapshotWord::kDrop};
  message.text.assign(100'000, 'x');
  ASSERT_TRUE(SendSnapshotMessage(pair.a.get(), message));
  EXPECT_EQ(ReceiveSnapshotMessage(pair.b.get())->message.text, std::string(kMaxSnapshotText, 'x'));
}

TEST(SnapshotProtocolTest, WhatIsNotAMessageIsRefused) {
  const std::string good = Bytes();
  std::vector<std::string> bad{"",
                               "x",
                               good.substr(0, 10),
                               good.substr(0, good.size() - 1),
                               good + "x",
                               std::string(1 << 16, 'x')};
  for (const size_t at : {0, 4, 8, 20}) {  // magic, version, word, bytes of text
    bad.push_back(good);
    bad.back()[at] ^= 0x55;
  }
  bad.push_back(good);
  bad.back()[23] = '\x7f';
  for (const std::string& bytes : bad) {
    if (bytes.empty()) continue;  // an empty packet is the end to who receives it
    Pair pair;
    pair.SendRaw(bytes);
    const auto got = ReceiveSnapshotMessage(pair.b.get());
    ASSERT_FALSE(got) << bytes.size();
    EXPECT_EQ(got.error().code, ErrorCode::kInvalid);
  }
}

TEST(SnapshotProtocolTest, ADescriptorComesOnlyWhereOneIsAskedFor) {
  Pair pair;
  const Descriptor sent(open("/dev/null", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(SendSnapshotMessage(pair.a.get(), Sample(), sent.get()));
  EXPECT_TRUE(ReceiveSnapshotMessage(pair.b.get(), true)->passed.valid());
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(SendSnapshotMessage(pair.a.get(), Sample(), sent.get()));
    EXPECT_FALSE(ReceiveSnapshotMessage(pair.b.get())->passed.valid());
  }
  EXPECT_EQ(OpenDescriptors(), before);
}

// Sends bytes with so many descriptors of /dev/null.
void SendWithDescriptors(int to, std::string bytes, size_t count) {
  const Descriptor sent(open("/dev/null", O_RDONLY | O_CLOEXEC));
  union {
    cmsghdr header;
    char room[CMSG_SPACE(250 * sizeof(int))];
  } control{};
  control.header.cmsg_level = SOL_SOCKET;
  control.header.cmsg_type = SCM_RIGHTS;
  control.header.cmsg_len = CMSG_LEN(count * sizeof(int));
  for (size_t i = 0; i < count; ++i) {
    const int fd = sent.get();
    std::memcpy(CMSG_DATA(&control.header) + i * sizeof fd, &fd, sizeof fd);
  }
  iovec part{bytes.data(), bytes.size()};
  msghdr out{};
  out.msg_iov = &part;
  out.msg_iovlen = 1;
  out.msg_control = control.room;
  out.msg_controllen = CMSG_SPACE(count * sizeof(int));
  ASSERT_EQ(sendmsg(to, &out, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// With a message as it should be, one that is cut, one without bytes, and one that is none.
TEST(SnapshotProtocolTest, DescriptorsThatNobodyWantsAreClosed) {
  const std::string good = Bytes();
  for (const std::string& bytes : {good, good.substr(0, 20), std::string(), good + "x"}) {
    for (const size_t count : {size_t{1}, size_t{2}, size_t{3}, size_t{250}}) {
      for (const bool asked : {true, false}) {
        Pair pair;
        const size_t before = OpenDescriptors();
        SendWithDescriptors(pair.b.get(), bytes, count);
        const auto got = ReceiveSnapshotMessage(pair.a.get(), asked);
        const bool kept = got && got->passed.valid();
        EXPECT_EQ(kept, asked && count == 1 && bytes == good) << count;
        EXPECT_EQ(OpenDescriptors(), before + (kept ? 1 : 0))
            << bytes.size() << " bytes, " << count;
        if (asked && count > 1) {
          EXPECT_FALSE(got && got->kind == Incoming::Kind::kMessage) << count;
        }
      }
    }
  }
}

TEST(SnapshotProtocolTest, NothingThereIsNotTheEnd) {
  Pair pair(SOCK_NONBLOCK);
  EXPECT_EQ(ReceiveSnapshotMessage(pair.b.get())->kind, Incoming::Kind::kNothing);
  { const Descriptor closed = std::move(pair.a); }
  EXPECT_EQ(ReceiveSnapshotMessage(pair.b.get())->kind, Incoming::Kind::kClosed);
}

// The kernel resets a connection whose end dies with messages that it has not read: what
// it had sent counts nevertheless.
TEST(SnapshotProtocolTest, WhatADeadProcessSaidIsHeard) {
  Pair pair(SOCK_NONBLOCK);
  ASSERT_TRUE(SendSnapshotMessage(pair.b.get(), Sample()));  // a never reads it
  const pid_t child = fork();
  if (child == 0) {
    const bool sent = SendSnapshotMessage(pair.a.get(), Sample()).has_value();
    _exit(sent ? 0 : 1);
  }
  { const Descriptor closed = std::move(pair.a); }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(ReceiveSnapshotMessage(pair.b.get())->kind, Incoming::Kind::kMessage);
  EXPECT_EQ(ReceiveSnapshotMessage(pair.b.get())->kind, Incoming::Kind::kClosed);
}

TEST(SnapshotProtocolTest, WithoutADaemonThereIsNobodyToConnectTo) {
  const auto socket = ConnectForSnapshots("/a/store/that/nobody/has");
  ASSERT_FALSE(socket);
  EXPECT_EQ(socket.error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace ckptfs
