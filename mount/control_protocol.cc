// SPDX-License-Identifier: Apache-2.0

#include "mount/control_protocol.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "core/base/digest.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

std::string Hex(uint64_t number) { return fmt::format("{:016x}", number); }

std::string DirectoryName() {
  if (::geteuid() == 0) return "/run/ckptfs";
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    return StrCat(std::string(runtime), "/ckptfs");
  }
  return StrCat("/tmp/ckptfs-", ::geteuid());
}

}  // namespace

Result<std::string> SocketDirectory(bool create) {
  const std::string directory = DirectoryName();
  if (create && ::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return Fail(ErrnoError(errno, directory));
  }
  struct stat info {};
  if (::lstat(directory.c_str(), &info) != 0) return Fail(ErrnoError(errno, directory));
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 022) != 0) {
    return Fail(ErrorCode::kPermission,
                StrCat(directory, ": must be a directory that only this user can write"));
  }
  return directory;
}

std::string SocketPrefix(std::string_view store) { return StrCat(Hex(HashOf(store)), "-"); }

std::string SocketName(std::string_view store, std::string_view mountpoint) {
  return StrCat(SocketPrefix(store), Hex(HashOf(mountpoint)), ".sock");
}

Result<std::string> ReceiveMessage(int socket, size_t limit) {
  std::string message;
  std::array<char, 4096> part;
  while (message.size() <= limit) {
    const ssize_t got = ::recv(socket, part.data(), part.size(), 0);
    if (got < 0 && errno == EINTR) continue;
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
  for (size_t done = 0; done < line.size();) {
    const ssize_t sent = ::send(socket, line.data() + done, line.size() - done, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return Fail(ErrnoError(errno, "control socket"));
    done += static_cast<size_t>(sent);
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
