// SPDX-License-Identifier: Apache-2.0

#include "snapshot/wire/protocol.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <numeric>

#include "core/base/fault_point.h"
#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "core/base/utf8.h"

namespace ckptfs {
namespace {

constexpr uint32_t kProtocolMagic = 0x73706b63;  // "ckps"

struct Wire {
  uint32_t magic = kProtocolMagic;
  uint32_t version = kSnapshotProtocol;
  uint32_t word = 0;
  uint32_t rank = 0;
  uint32_t world = 0;
  uint32_t text_bytes = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;
  uint64_t sequence = 0;
  uint64_t chunk = 0;
  uint64_t length = 0;
  char text[kMaxSnapshotText];  // the first text_bytes are sent
};
constexpr size_t kWireHead = offsetof(Wire, text);

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(sizeof(int))];
};

Result<SnapshotMessage> Decode(const Wire& wire, size_t bytes) {
  if (bytes < kWireHead || wire.magic != kProtocolMagic) {
    return Fail(ErrorCode::kInvalid, "snapshots: not a message");
  }
  if (wire.version != kSnapshotProtocol) {
    return Fail(ErrorCode::kInvalid,
                StrCat("snapshots: the other side speaks "
                       "version ",
                       wire.version, " of the protocol, this side ", kSnapshotProtocol, " only"));
  }
  if (wire.text_bytes > kMaxSnapshotText || bytes != kWireHead + wire.text_bytes) {
    return Fail(ErrorCode::kInvalid, "snapshots: a message of the wrong length");
  }
  if (wire.word < static_cast<uint32_t>(SnapshotWord::kHello) ||
      wire.word > static_cast<uint32_t>(SnapshotWord::kAsk)) {
    return Fail(ErrorCode::kInvalid, StrCat("snapshots: unknown message ", wire.word));
  }
  return SnapshotMessage{static_cast<SnapshotWord>(wire.word),
                         wire.rank,
                         wire.world,
                         wire.step,
                         wire.attempt,
                         wire.sequence,
                         wire.chunk,
                         wire.length,
                         std::string(wire.text, wire.text_bytes)};
}

// Takes every descriptor that the kernel gave to this process; the caller keeps the first.
Descriptor TakeDescriptor(msghdr& message) {
  Descriptor first;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
      Descriptor one(fd);
      if (!first.valid()) first = std::move(one);
    }
  }
  return first;
}

constexpr uint64_t kAgain = 64;                    // saves of one step
constexpr uint64_t kTurn = kAgain * (1ull << 42);  // steps: milliseconds since 1970 are below

bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

uint64_t NextAttempt(uint64_t last, uint64_t step) {
  const uint64_t first = (std::min(step, kTurn / kAgain - 2) + 1) * kAgain;
  const uint64_t before = last % kTurn;
  if (first > before) return last - before + first;
  const bool again = first == before - before % kAgain && before % kAgain < kAgain - 1;
  return again ? last + 1 : last - before + kTurn + first;
}

uint64_t StepOf(uint64_t attempt) { return std::max(attempt % kTurn / kAgain, uint64_t{1}) - 1; }

uint64_t TurnOf(uint64_t attempt) { return attempt / kTurn; }

std::vector<uint64_t> AttemptsOf(uint64_t turn, uint64_t step) {
  std::vector<uint64_t> attempts(kAgain);
  std::iota(attempts.begin(), attempts.end(), NextAttempt(turn * kTurn, step));
  return attempts;
}

uint64_t InTurnOf(uint64_t attempt, uint64_t last) {
  return TurnOf(attempt) > TurnOf(last) ? TurnOf(attempt) * kTurn : last;
}

Digest StreamOf(std::string_view run, std::string_view job) {
  return DigestOf(StrCat(run, "\n", job));
}

namespace {

// Returns how many bytes of `wire` are sent.
size_t Encode(const SnapshotMessage& message, Wire& wire) {
  wire.word = static_cast<uint32_t>(message.word);
  wire.rank = message.rank;
  wire.world = message.world;
  wire.step = message.step;
  wire.attempt = message.attempt;
  wire.sequence = message.sequence;
  wire.chunk = message.chunk;
  wire.length = message.length;
  wire.text_bytes = static_cast<uint32_t>(CutUtf8(message.text, kMaxSnapshotText).size());
  std::memcpy(wire.text, message.text.data(), wire.text_bytes);
  return kWireHead + wire.text_bytes;
}

}  // namespace

std::string EncodeSnapshotMessage(const SnapshotMessage& message) {
  Wire wire;
  const size_t bytes = Encode(message, wire);
  return {reinterpret_cast<const char*>(&wire), bytes};
}

Result<SnapshotMessage> DecodeSnapshotMessage(std::string_view bytes) {
  Wire wire;
  std::memcpy(&wire, bytes.data(), std::min(bytes.size(), sizeof wire));
  return Decode(wire, bytes.size());
}

Status SendSnapshotMessage(int socket, const SnapshotMessage& message, int passed, Full full) {
  Wire wire;
  iovec part{&wire, Encode(message, wire)};
  msghdr out{};
  out.msg_iov = &part;
  out.msg_iovlen = 1;
  Control control{};
  if (passed >= 0) {
    out.msg_control = control.bytes;
    out.msg_controllen = sizeof control.bytes;
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof passed);
    std::memcpy(CMSG_DATA(&control.header), &passed, sizeof passed);
  }
  FaultPoint();
  const int flags = MSG_NOSIGNAL | (full == Full::kFail ? MSG_DONTWAIT : 0);
  while (sendmsg(socket, &out, flags) < 0) {
    if (errno == EINTR) continue;
    if (WouldBlock(errno))
      return Fail(ErrorCode::kExhausted, "snapshots: the other side does not read");
    return Fail(ErrnoError(errno, "snapshots"));
  }
  FaultPoint();
  return {};
}

Result<Incoming> ReceiveSnapshotMessage(int socket, bool descriptor) {
  Wire wire;
  iovec part{&wire, sizeof wire};
  Control control{};
  bool reset = false;
  while (true) {
    msghdr in{};
    in.msg_iov = &part;
    in.msg_iovlen = 1;
    if (descriptor) {
      // The kernel installs one descriptor at most: the padding would have room for a second.
      in.msg_control = control.bytes;
      in.msg_controllen = CMSG_LEN(sizeof(int));
    }
    const ssize_t got = recvmsg(socket, &in, MSG_CMSG_CLOEXEC);
    Incoming incoming;
    if (got < 0 && errno == EINTR) continue;
    // A process that dies with unread messages resets the
    // connection; what it sent before is still to be read.
    if (got < 0 && errno == ECONNRESET && !std::exchange(reset, true)) continue;
    if (got < 0 && WouldBlock(errno)) return incoming;
    if (got < 0 && errno != ECONNRESET) return Fail(ErrnoError(errno, "snapshots"));
    // First: a message without bytes may carry one, too.
    Descriptor passed = got >= 0 ? TakeDescriptor(in) : Descriptor();
    if (got <= 0) {
      incoming.kind = Incoming::Kind::kClosed;
      return incoming;
    }
    if (descriptor && (in.msg_flags & MSG_CTRUNC) != 0) {
      if (!passed.valid()) {  // as of one that had to be left out
        return Fail(ErrorCode::kExhausted,
                    "snapshots: a descriptor that was passed could not be taken: too many open "
                    "files (ulimit -n)");
      }
      return Fail(ErrorCode::kInvalid, "snapshots: a message with more descriptors than one");
    }
    if ((in.msg_flags & MSG_TRUNC) != 0) {
      return Fail(ErrorCode::kInvalid, "snapshots: a message that is too long");
    }
    CKPT_ASSIGN_OR_RETURN(incoming.message, Decode(wire, static_cast<size_t>(got)));
    incoming.kind = Incoming::Kind::kMessage;
    incoming.passed = std::move(passed);
    FaultPoint();
    return incoming;
  }
}

Result<std::string> SnapshotSocketPath(std::string_view store, bool create) {
  CKPT_ASSIGN_OR_RETURN(const std::string directory, SocketDirectory(create));
  std::string path = StrCat(directory, "/", StoreSocketName(store), ".snapshots");
  CKPT_RETURN_IF_ERROR(SocketAddress(path));
  return path;
}

uint64_t SnapshotDoorOf(const std::string& store) {
  struct stat status {};
  const auto path = SnapshotSocketPath(store, false);
  return path && stat(path->c_str(), &status) == 0 ? status.st_ino : 0;
}

Result<Descriptor> ConnectForSnapshots(std::string_view store) {
  CKPT_ASSIGN_OR_RETURN(const std::string path, SnapshotSocketPath(store, false));
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return Fail(ErrnoError(errno, "socket"));
  CKPT_ASSIGN_OR_RETURN(const sockaddr_un address, SocketAddress(path));
  if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    return socket;
  }
  if (errno != ENOENT && errno != ECONNREFUSED) return Fail(ErrnoError(errno, path));
  return Fail(ErrorCode::kNotFound, StrCat("no daemon receives snapshots for ", store));
}

}  // namespace ckptfs
