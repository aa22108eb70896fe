// SPDX-License-Identifier: Apache-2.0

#include "core/base/runtime_directory.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "core/base/digest.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

std::string RuntimeDirectoryName() {
  if (::geteuid() == 0) return "/run/ckptfs";
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    return StrCat(std::string(runtime), "/ckptfs");
  }
  return StrCat("/tmp/ckptfs-", ::geteuid());
}

// As the kernel saw it when it connected.
std::optional<ucred> PeerOf(int connection) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return std::nullopt;
  return peer;
}

}  // namespace

Result<std::string> SocketDirectory(bool create) {
  const std::string directory = RuntimeDirectoryName();
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

std::string StoreSocketName(std::string_view store) {
  return fmt::format("{:016x}", HashOf(store));
}

Result<sockaddr_un> SocketAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) {
    return Fail(ErrorCode::kInvalid, StrCat(path, ": too long for a socket"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Descriptor PeerProcess(int connection) {
  const auto peer = PeerOf(connection);
  return peer && peer->pid > 0 ? OpenProcess(peer->pid) : Descriptor();
}

bool IsPeerTrusted(int connection) {
  const auto peer = PeerOf(connection);
  return peer && (peer->uid == 0 || peer->uid == ::geteuid());
}

}  // namespace ckptfs
