// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/receiver.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <utility>

#include "core/base/runtime_directory.h"
#include "core/base/single_flight.h"
#include "snapshot/receive/receiver_state.h"

namespace ckptfs {
namespace {

constexpr size_t kStatusLines = 100;

}  // namespace

Status Receiver::State::Listen() {
  CKPT_ASSIGN_OR_RETURN(path, SnapshotSocketPath(options.store, true));
  const std::string beside = StrCat(path, ".lock");
  CKPT_RETURN_IF_ERROR(OpenDescriptor(beside, O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
  lock = FileLock::Take(beside, O_RDWR, LOCK_EX | LOCK_NB);
  if (!lock) {
    return Fail(ErrorCode::kExists,
                StrCat("another daemon receives the snapshots for ", options.store));
  }
  unlink(path.c_str());
  CKPT_ASSIGN_OR_RETURN(const sockaddr_un address, SocketAddress(path));
  listener = Descriptor(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  budget->wake = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!listener.valid() || !budget->wake.valid() ||
      bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      chmod(path.c_str(), 0600) != 0 || listen(listener.get(), 1024) != 0) {
    return Fail(ErrnoError(errno, path));
  }
  return {};
}

Receiver::Receiver(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::unique_ptr<Receiver>> Receiver::Start(ReceiverOptions options) {
  auto state = std::make_unique<State>();
  state->options = std::move(options);
  state->budget->limit = state->options.memory_bytes;
  state->budget->chunk_bytes = state->options.chunk_bytes;
  state->budget->shelf = state->options.shelf;
  state->budget->ranks = RankCounts(state->options.max_sessions);
  CKPT_RETURN_IF_ERROR(CheckArenaShape({state->options.chunk_bytes, 1}));
  CKPT_RETURN_IF_ERROR(state->Listen());
  state->budget->stream = std::bind_front(&Receiver::State::Stream, state.get());
  CKPT_RETURN_IF_ERROR(state->options.landing->Start());
  for (const AttemptName& name : state->options.landing->names()) state->steps.Keep(name);
  state->ranks_thread = std::thread([raw = state.get()] { raw->Serve(); });
  if (state->options.shelf) {
    state->shelf_thread = std::thread([raw = state.get()] {
      raw->options.shelf->HandOver([raw](std::string_view line) { raw->Say(line); });
    });
  }
  return std::unique_ptr<Receiver>(new Receiver(std::move(state)));
}

Receiver::~Receiver() {
  if (state_->shelf_thread.joinable()) state_->shelf_thread.join();  // while it is answered
  state_->stopping = true;
  state_->budget->Wake();
  state_->ranks_thread.join();
  for (const auto& session : state_->sessions) {
    auto making = session->TakeMaking();
    if (!making) continue;
    *making->ends = true;
    state_->unwanted.push_back(*std::move(making));
  }
  for (ArenaMaking& one : state_->unwanted) one.thread.join();
  for (State::Ending& one : state_->endings) one.thread.join();
  Landing& landing = *state_->options.landing;
  landing.StopWorlds();
  // Another daemon will finish what is not finished now.
  if (state_->options.shelf) state_->options.shelf->Freeze();
  const uint64_t dropped = landing.status().dropped;
  landing.Finish();
  const bool finished = state_->steps.size() == 0 && landing.status().dropped == dropped;
  if (finished && state_->options.shelf) state_->options.shelf->Thaw();
  // The socket is ours: the lock is still held.
  unlink(state_->path.c_str());
  unlink(StrCat(state_->path, ".lock").c_str());
}

ReceiverStatus Receiver::status() const {
  const ArenaBudget& budget = *state_->budget;
  ReceiverStatus status{.arena_bytes = budget.used,
                        .arena_limit_bytes = state_->options.memory_bytes,
                        .huge_bytes = budget.huge,
                        .full_drops = budget.full_drops,
                        .full_waits = budget.full_waits};
  {
    MutexLock guard(state_->mutex);
    status.ranks = state_->ranks;
    status.incoming = state_->incoming;
    for (const auto& [name, line] : state_->incomplete) {
      if (status.steps.size() >= kStatusLines) break;
      status.steps.push_back(line);
    }
  }
  status.saves = state_->options.landing->status();
  auto lines = std::exchange(status.saves.steps, {});
  status.steps.insert(status.steps.begin(), lines.begin(), lines.end());
  if (status.steps.size() >= kStatusLines) status.steps.emplace_back("...");
  return status;
}

}  // namespace ckptfs
