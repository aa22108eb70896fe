// SPDX-License-Identifier: Apache-2.0

#include "mount/control/control_client.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/base/descriptor.h"
#include "core/base/runtime_directory.h"
#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/control/control_protocol.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

// 0 or errno.
int Connect(int fd, const std::string& path) {
  const auto address = SocketAddress(path);
  if (!address) return ENAMETOOLONG;
  const auto* at = reinterpret_cast<const sockaddr*>(&*address);
  return ::connect(fd, at, sizeof *address) == 0 ? 0 : errno;
}

Result<Json> Ask(const Descriptor& socket, const std::string& path, const Json& request) {
  if (!socket.valid()) return Fail(ErrnoError(errno, "socket"));
  if (const int error = Connect(socket.get(), path)) {
    if (error == ECONNREFUSED) ::unlink(path.c_str());  // its daemon was killed
    return Fail(ErrnoError(error, path));
  }
  CKPT_RETURN_IF_ERROR(
      SendMessage(socket.get(), request.dump(-1, ' ', false, Json::error_handler_t::replace)));
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReceiveMessage(socket.get(), kMaxReply));
  Json reply = Json::parse(text, nullptr, false);
  if (!reply.is_object())
    return Fail(ErrorCode::kInternal,
                "the daemon's answer is not a JSON "
                "object");
  if (reply.value("ok", false)) return reply["result"];
  return Fail(ErrorCodeNamed(reply.value("code", "")), reply.value("message", "no reason given"));
}

Descriptor NewSocket(Patience patience) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval most{patience.count() / 1000, patience.count() % 1000 * 1000};
  for (const int way : {SO_RCVTIMEO, SO_SNDTIMEO}) {
    ::setsockopt(socket.get(), SOL_SOCKET, way, &most, sizeof most);
  }
  return socket;
}

std::optional<LiveMount> Greet(const std::string& path, Patience patience) {
  const auto hello = Ask(NewSocket(patience), path, Json{{"op", "hello"}});
  if (!hello || !hello->is_object()) return std::nullopt;
  return LiveMount{path,
                   BytesOfUtf8(hello->value("store", "")),
                   BytesOfUtf8(hello->value("mountpoint", "")),
                   hello->value("pid", 0),
                   BytesOfUtf8(hello->value("hf_config", "")),
                   hello->value("version", ""),
                   hello->value("generation", uint64_t{0}),
                   hello->value("ingest", false)};
}

}  // namespace

std::vector<LiveMount> FindLiveMounts(std::string_view store, Patience patience) {
  std::vector<LiveMount> mounts;
  const auto directory = SocketDirectory(false);
  if (!directory) return mounts;
  std::error_code error;
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(*directory, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.ends_with(".sock")) continue;
    if (store.empty() || name.starts_with(SocketPrefix(store))) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) {
    if (auto mount = Greet(path, patience)) mounts.push_back(std::move(*mount));
  }
  return mounts;
}

std::vector<DaemonFacts> SilentDaemons(std::string_view store,
                                       std::span<const LiveMount> answered) {
  std::vector<DaemonFacts> daemons = FindDaemonRecords(store);
  std::erase_if(daemons, [&](const DaemonFacts& daemon) {
    return daemon.pid == ::getpid() || !IsAlive(daemon) ||
           std::any_of(answered.begin(), answered.end(),
                       [&](const LiveMount& mount) { return mount.pid == daemon.pid; });
  });
  return daemons;
}

std::string DescribeSilent(const DaemonFacts& daemon) {
  return StrCat(daemon.mountpoint.empty() ? daemon.store : daemon.mountpoint, ": its daemon (pid ",
                daemon.pid, ") does not answer");
}

Result<std::string> AskDaemon(const LiveMount& mount, std::string_view operation,
                              const std::map<std::string, std::string>& arguments,
                              Patience patience) {
  Json request{{"op", std::string(operation)}};
  for (const auto& [key, value] : arguments) request[key] = Utf8OfBytes(value);
  CKPT_ASSIGN_OR_RETURN(const Json result, Ask(NewSocket(patience), mount.socket, request));
  return result.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<Descriptor> OpenReader(const LiveMount& mount, const std::string& run, const std::string& id,
                              const std::string& layout) {
  Descriptor socket = NewSocket(kAnswer);
  const Json request{
      {"op", "read"}, {"run", Utf8OfBytes(run)}, {"id", Utf8OfBytes(id)}, {"layout", layout}};
  CKPT_RETURN_IF_ERROR(Ask(socket, mount.socket, request));
  return socket;
}

namespace {

// A look at all steps is cheaper than at so many one by one.
constexpr size_t kManySteps = 16;

bool IsAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char letter) { return (letter & 0x80) == 0; });
}

Status Refresh(const LiveMount& mount, std::span<const StepRecord> steps) {
  const bool each = !steps.empty() && steps.size() <= kManySteps &&
                    std::all_of(steps.begin(), steps.end(), [](const StepRecord& step) {
                      return IsAscii(step.run) && IsAscii(step.id);  // JSON has no other bytes
                    });
  if (!each) {
    CKPT_RETURN_IF_ERROR(AskDaemon(mount, "refresh"));
    return {};
  }
  for (const StepRecord& step : steps) {
    CKPT_RETURN_IF_ERROR(AskDaemon(mount, "refresh", {{"run", step.run}, {"id", step.id}}));
  }
  return {};
}

}  // namespace

std::vector<std::string> RefreshDaemons(std::string_view store, std::span<const StepRecord> steps) {
  std::vector<std::string> failures;
  if (const Status asked = CheckSocketDirectory(); !asked)
    failures.push_back(asked.error().message);
  const std::vector<LiveMount> mounts = FindLiveMounts(store);
  for (const LiveMount& mount : mounts) {
    const Status done = Refresh(mount, steps);
    if (!done) failures.push_back(StrCat(mount.mountpoint, ": ", done.error().message));
  }
  for (const DaemonFacts& daemon : SilentDaemons(store, mounts)) {
    failures.push_back(StrCat(DescribeSilent(daemon),
                              "; it will see the change when it answers "
                              "again"));
  }
  return failures;
}

}  // namespace ckptfs
