// SPDX-License-Identifier: Apache-2.0

#include "mount/control/control_protocol.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "core/base/digest.h"
#include "core/base/runtime_directory.h"
#include "core/base/strings.h"

namespace ckptfs {

std::string SocketPrefix(std::string_view store) { return StrCat(StoreSocketName(store), "-"); }

std::string SocketName(std::string_view store, std::string_view mountpoint) {
  return fmt::format("{}{:016x}.sock", SocketPrefix(store), HashOf(mountpoint));
}

Result<std::string> ReceiveMessage(int socket, size_t limit) {
  std::string message;
  std::array<char, 4096> part;
  while (message.size() <= limit) {
    const ssize_t got = ::recv(socket, part.data(), part.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return Fail(ErrorCode::kIo, "control socket: no answer in time");
    }
    if (got < 0) return Fail(ErrnoError(errno, "control socket"));
    if (got == 0) return Fail(ErrorCode::kIo, "control socket: the other side went away");
    message.append(part.data(), static_cast<size_t>(got));
    if (message.back() != '\n') continue;
    message.pop_back();
    return message;
  }
  return Fail(ErrorCode::kInvalid, StrCat("control socket: a message above ", limit, " bytes"));
}

Status SendMessage(int socket, std::string_view message) {
  const std::string line = StrCat(message, "\n");
  return SendBytes(socket, std::as_bytes(std::span<const char>(line)));
}

Status SendBytes(int socket, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return Fail(ErrnoError(errno, "control socket"));
    bytes = bytes.subspan(static_cast<size_t>(sent));
  }
  return {};
}

ErrorCode ErrorCodeNamed(std::string_view name) {
  for (const ErrorCode code : {ErrorCode::kInvalid, ErrorCode::kNotFound, ErrorCode::kExists,
                               ErrorCode::kUnsupported, ErrorCode::kStale, ErrorCode::kDataLoss,
                               ErrorCode::kPermission, ErrorCode::kExhausted, ErrorCode::kIo}) {
    if (ErrorCodeName(code) == name) return code;
  }
  return ErrorCode::kInternal;
}

}  // namespace ckptfs
