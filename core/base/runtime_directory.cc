// SPDX-License-Identifier: Apache-2.0

#include "core/base/runtime_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <sstream>

#include "core/base/digest.h"
#include "core/base/strings.h"
#include "core/base/trust.h"

namespace ckptfs {
namespace {

std::string RuntimeDirectoryName() {
  if (::geteuid() == 0) return "/run/ckptfs";
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/') {
    return StrCat(std::string(runtime), "/ckptfs");
  }
  return StrCat("/tmp/ckptfs-", ::geteuid());
}

// Says what is at the directory's name if this user did not make it; else returns "".
std::string WhyNotOurs(const struct stat& info) {
  if (S_ISLNK(info.st_mode)) return "is a symbolic link, which is not followed there";
  if (!S_ISDIR(info.st_mode)) return "is not a directory";
  return WhyNotTrusted(info, Believed::kOwnUser);
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
  const std::string wrong = WhyNotOurs(info);
  if (wrong.empty()) return directory;
  Error error{ErrorCode::kPermission, StrCat(directory, ", where daemons of user ", ::geteuid(),
                                             " have their sockets, ", wrong)};
  return Fail(std::move(error).Needing(
      ::geteuid() == 0 ? StrCat("remove ", directory)
                       : std::string("have it removed, or set XDG_RUNTIME_DIR to a directory of "
                                     "your own")));
}

Status CheckSocketDirectory() {
  const auto directory = SocketDirectory(false);
  if (directory || directory.error().code != ErrorCode::kPermission) return {};
  return Fail(Error(directory.error()));
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

std::chrono::nanoseconds TimeSinceBoot() {
  timespec now{};
  ::clock_gettime(CLOCK_BOOTTIME, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

std::optional<std::chrono::nanoseconds> PeerBirth(int connection) {
  constexpr int kBirth = 22;  // proc_pid_stat(5); the second one is a name in parentheses
  const auto peer = PeerOf(connection);
  const Descriptor process = PeerProcess(connection);
  if (!process.valid()) return std::nullopt;
  const auto file = OpenDescriptor(StrCat("/proc/", peer->pid, "/stat"), O_RDONLY);
  std::string fields(4096, '\0');
  const ssize_t got = file ? ::read(file->get(), fields.data(), fields.size()) : -1;
  if (got < 0) return std::nullopt;
  fields.resize(static_cast<size_t>(got));
  fields.erase(0, fields.rfind(')') + 1);
  std::istringstream words(fields);
  std::string word;
  for (int at = 2; at + 1 < kBirth; ++at) words >> word;
  uint64_t ticks = 0;
  words >> ticks;
  pollfd ended{process.get(), POLLIN, 0};
  const long second = ::sysconf(_SC_CLK_TCK);
  // One that has ended may have left its number to another.
  if (!words || second <= 0 || ::poll(&ended, 1, 0) != 0) return std::nullopt;
  return std::chrono::nanoseconds((ticks + 1) * (1'000'000'000 / static_cast<uint64_t>(second)));
}

bool IsPeerTrusted(int connection) {
  const auto peer = PeerOf(connection);
  return peer && (peer->uid == 0 || peer->uid == ::geteuid());
}

}  // namespace ckptfs
