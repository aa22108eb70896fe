// SPDX-License-Identifier: Apache-2.0

#include "mount/control/control_server.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/base/runtime_directory.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/base/utf8.h"
#include "mount/control/control_protocol.h"
#include "mount/logging.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr int kThreads = 4;  // a warm takes long; the others must go on
constexpr timeval kPatience{5, 0};
constexpr std::chrono::milliseconds kPause{50};  // until descriptors or memory are free again

std::string Text(const Json& request, const char* key) {
  const auto found = request.find(key);
  const bool there = found != request.end() && found->is_string();
  return there ? BytesOfUtf8(found->get_ref<const std::string&>()) : "";
}

// Hostile or odd bytes in names must not end the daemon.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Refusal(const Error& error) {
  return Dump(Json{
      {"ok", false}, {"code", std::string(ErrorCodeName(error.code))}, {"message", error.message}});
}

std::string Success(Json result) { return Dump(Json{{"ok", true}, {"result", std::move(result)}}); }

Json ShownJson(const std::optional<ShownStep>& step) {
  if (!step) return nullptr;
  return {{"run", Utf8OfBytes(step->run)}, {"id", Utf8OfBytes(step->id)}};
}

}  // namespace

Result<std::unique_ptr<ControlServer>> ControlServer::Start(
    std::string store, std::string mountpoint, DaemonStatus status, StepCatalogue* catalogue,
    std::string hf_config, Hooks hooks, uint64_t generation) {
  std::unique_ptr<ControlServer> server(
      new ControlServer(std::move(store), std::move(mountpoint), std::move(status), catalogue,
                        std::move(hf_config), std::move(hooks), generation));
  CKPT_RETURN_IF_ERROR(server->Listen());
  for (int i = 0; i < kThreads; ++i) {
    server->threads_.emplace_back([raw = server.get()] { raw->Accept(); });
  }
  return server;
}

Status ControlServer::Listen() {
  CKPT_ASSIGN_OR_RETURN(const std::string directory, SocketDirectory(true));
  // Several may wait without a mount, each by its own name.
  const std::string place = mountpoint_.empty() ? StrCat("daemon ", ::getpid()) : mountpoint_;
  path_ = StrCat(directory, "/", SocketName(store_, place));
  // Its name is there once it listens: clients remove what refuses them.
  const std::string begun = path_ + "~";
  CKPT_ASSIGN_OR_RETURN(const sockaddr_un address, SocketAddress(begun));
  listener_ = Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ::unlink(begun.c_str());
  struct stat info {};
  if (!listener_.valid() ||
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(begun.c_str(), 0600) != 0 || ::listen(listener_.get(), 16) != 0 ||
      ::stat(begun.c_str(), &info) != 0 || ::rename(begun.c_str(), path_.c_str()) != 0) {
    return Fail(ErrnoError(errno, path_));
  }
  inode_ = info.st_ino;
  return {};
}

ControlServer::~ControlServer() {
  stopping_ = true;
  ::shutdown(listener_.get(), SHUT_RDWR);  // wakes the threads in accept
  for (std::thread& thread : threads_) thread.join();
  struct stat info {};
  if (inode_ != 0 && ::stat(path_.c_str(), &info) == 0 && info.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
}

void ControlServer::Accept() {
  while (true) {
    Descriptor connection(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (stopping_) return;
    if (!connection.valid()) {
      if (errno != EINTR && errno != ECONNABORTED) std::this_thread::sleep_for(kPause);
      continue;
    }
    ::setsockopt(connection.get(), SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience);
    ::setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
    const Status spoken = Caught([&]() -> Status {
      Converse(std::move(connection));
      return {};
    });
    // The thread goes on: one request that fails must not end the daemon.
    if (!spoken) Log(LogLevel::kError, StrCat("control request: ", spoken.error().message));
  }
}

void ControlServer::Converse(Descriptor connection) {
  std::string reply;
  if (!IsPeerTrusted(connection.get())) {
    reply = Refusal(Error{ErrorCode::kPermission, "the daemon answers only its own user and root"});
  } else {
    const auto answer = Caught([&]() -> Result<std::string> {
      CKPT_ASSIGN_OR_RETURN(const std::string request,
                            ReceiveMessage(connection.get(), kMaxRequest));
      return Answer(request, connection);
    });
    reply = answer ? *answer : Refusal(answer.error());
  }
  if (!connection.valid()) return;  // it is a reader's
  if (const Status sent = SendMessage(connection.get(), reply); !sent) {
    Log(LogLevel::kWarning, sent.error().message);
  }
}

Status ControlServer::BeginReading(const Json& request, Descriptor& connection) {
  if (!readers_) return Fail(ErrorCode::kUnsupported, "the daemon does not hold steps in memory");
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(Text(request, "layout")));
  return readers_->Begin(connection, Text(request, "run"), Text(request, "id"), layout,
                         Success(nullptr));
}

std::string ControlServer::Answer(const std::string& text, Descriptor& connection) {
  const Json request = Json::parse(text, nullptr, false);
  if (!request.is_object())
    return Refusal(Error{ErrorCode::kInvalid,
                         "the request is not a JSON "
                         "object"});
  const std::string operation = Text(request, "op");
  if (operation == "hello") {
    return Success(Json{{"store", Utf8OfBytes(store_)},
                        {"mountpoint", Utf8OfBytes(mountpoint_)},
                        {"pid", ::getpid()},
                        {"hf_config", Utf8OfBytes(hf_config_)},
                        {"version", CKPTFS_VERSION},
                        {"ingest", status_.mirror != nullptr},
                        {"generation", generation_}});
  }
  if (operation == "status") {
    const bool counters = Text(request, "depth") == "counters";
    return Success(status_.Render(counters ? StatusDepth::kCounters : StatusDepth::kAll));
  }
  if (operation == "reload") {
    if (!hooks_.reload) return Refusal(Error{ErrorCode::kUnsupported, "it has no configuration"});
    const auto done = hooks_.reload();
    return done ? Success(*done) : Refusal(done.error());
  }
  if (operation == "upgrade") {
    if (!hooks_.upgrade) {
      return Refusal(Error{ErrorCode::kUnsupported,
                           status_.mirror
                               ? "jobs save there: unmount it when none does, and start it again"
                               : "a daemon without a mount: start it again, ranks tell the next "
                                 "one"});
    }
    const Status begun = hooks_.upgrade(Text(request, "program"));
    return begun ? Success(nullptr) : Refusal(begun.error());
  }
  if (operation == "read") {
    const Status begun = BeginReading(request, connection);
    return begun ? "" : Refusal(begun.error());
  }
  if (filesystem_ != nullptr) return AnswerOfMount(request, operation);
  if (operation == "refresh" || operation == "let_go") return Success(nullptr);  // it shows none
  return Refusal(Error{ErrorCode::kUnsupported, "the daemon does not show any views"});
}

std::string ControlServer::AnswerOfMount(const Json& request, const std::string& operation) {
  if (operation == "warm") {
    const auto done = filesystem_->Warm(Text(request, "layout"), Text(request, "prefix"));
    if (!done) return Refusal(done.error());
    return Success(
        Json{{"files", done->files}, {"bytes", done->bytes}, {"skipped", done->skipped}});
  }
  const std::string run = Text(request, "run");
  if (operation == "refresh") {
    const Status done =
        run.empty() ? filesystem_->Refresh() : filesystem_->RefreshStep(run, Text(request, "id"));
    return done ? Success(nullptr) : Refusal(done.error());
  }
  if (operation == "let_go") {
    filesystem_->LetGo(run, Text(request, "id"));
    return Success(nullptr);
  }
  if (operation == "shown") return Success(ShownJson(filesystem_->ViewShows()));
  if (operation == "switch") {
    const auto before = filesystem_->SwitchView(run, Text(request, "id"));
    return before ? Success(ShownJson(*before)) : Refusal(before.error());
  }
  return Refusal(Error{ErrorCode::kInvalid, StrCat("unknown operation '", operation, "'")});
}

}  // namespace ckptfs
