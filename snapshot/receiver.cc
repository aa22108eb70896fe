// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receiver.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/file_lock.h"
#include "core/base/mutex.h"
#include "core/base/runtime_directory.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/protocol.h"
#include "snapshot/rank_session.h"

namespace ckptfs {
namespace {

constexpr int kTurn = 1000;  // milliseconds between looks at what is late

std::string NameOf(const AttemptName& name, uint64_t step) { return StrCat(name.run, "/", step); }

}  // namespace

struct Receiver::State {
  ReceiverOptions options;
  std::string path;
  std::unique_ptr<const FileLock> lock;
  Descriptor listener;
  std::shared_ptr<ArenaBudget> budget = std::make_shared<ArenaBudget>();
  std::atomic<bool> stopping{false};

  // The ranks' thread alone:
  std::vector<std::unique_ptr<RankSession>> sessions;
  IncomingSteps steps;

  struct Kept {
    AttemptName name;
    uint64_t step = 0;
    Status done;
  };
  Mutex mutex;
  CondVar wake_keeper;
  std::deque<ReceivedStep> whole GUARDED_BY(mutex);  // the first is being kept
  std::deque<PartAgain> again GUARDED_BY(mutex);     // to be looked for in the store
  std::vector<Kept> kept GUARDED_BY(mutex);
  bool finish GUARDED_BY(mutex) = false;
  uint64_t durable GUARDED_BY(mutex) = 0;
  uint64_t dropped GUARDED_BY(mutex) = 0;
  uint64_t incoming GUARDED_BY(mutex) = 0;
  uint64_t ranks GUARDED_BY(mutex) = 0;
  std::string last_durable GUARDED_BY(mutex);
  std::string last_drop GUARDED_BY(mutex);

  std::thread ranks_thread;
  std::thread keeper_thread;
  std::thread shelf_thread;

  Status Listen();
  void Serve();
  void Keep();
  void Accept();
  // False if it is over.
  bool Turn(RankSession& session, short events, Arrivals& arrivals);
  void LookFor(const PartAgain& part);
  void Say(std::string_view line) const {
    if (options.log) options.log(line);
  }
  void Tell(const AttemptName& name, uint64_t step, SnapshotWord word, const std::string& text);
  void TellNews();
};

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

void Receiver::State::Accept() {
  while (true) {
    Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) return;
    SnapshotMessage refused{SnapshotWord::kRefused};
    if (!IsPeerTrusted(connection.get()))
      refused.text = "snapshots are taken of its own user and root only";
    if (sessions.size() >= options.max_sessions) refused.text = "too many ranks";
    if (refused.text.empty()) {
      sessions.push_back(std::make_unique<RankSession>(std::move(connection), budget));
    } else {
      (void)SendSnapshotMessage(connection.get(), refused);
    }
  }
}

bool Receiver::State::Turn(RankSession& session, short events, Arrivals& arrivals) {
  std::string why = "went away before its part was whole";
  const auto outcome = Caught([&]() -> Result<bool> {
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) {
      CKPT_ASSIGN_OR_RETURN(const bool there, session.Receive(steps, arrivals));
      if (!there) return false;
    }
    CKPT_RETURN_IF_ERROR(session.Advance());
    return true;
  });
  if (outcome && *outcome) return true;
  if (!outcome) {
    why = outcome.error().message;
    const bool later = outcome.error().code == ErrorCode::kExists;
    if (!later) {
      Say(StrCat("snapshots of ", session.introduced() ? session.run() : "a stranger", ": ", why));
    }
    SnapshotMessage refused{SnapshotWord::kRefused};
    refused.text = why;
    refused.sequence = later ? 1 : 0;
    (void)SendSnapshotMessage(session.socket(), refused);
  }
  session.Leave(steps, why);
  return false;
}

void Receiver::State::Tell(const AttemptName& name, uint64_t step, SnapshotWord word,
                           const std::string& text) {
  for (const auto& session : sessions) {
    if (session->run() != name.run || session->job() != name.job) continue;
    SnapshotMessage message{word};
    message.step = step;
    message.attempt = name.attempt;
    message.text = text;
    session->Say(std::move(message));
  }
}

// What was kept or dropped meanwhile.
void Receiver::State::TellNews() {
  std::vector<Kept> news;
  {
    MutexLock guard(mutex);
    news = std::exchange(kept, {});
    incoming = steps.size();
    ranks = sessions.size();
  }
  for (const Kept& one : news) {
    steps.Forget(one.name);
    Tell(one.name, one.step, one.done ? SnapshotWord::kDurable : SnapshotWord::kDropped,
         one.done ? "" : one.done.error().message);
  }
  for (const DroppedStep& one : steps.TakeDropped()) {
    const std::string line = StrCat("snapshot ", NameOf(one.name, one.step), " dropped: ", one.why);
    Tell(one.name, one.step, SnapshotWord::kDropped, one.why);
    if (one.again) continue;
    Say(line);
    MutexLock guard(mutex);
    ++dropped;
    last_drop = line;
  }
}

void Receiver::State::Serve() {
  while (!stopping) {
    std::vector<pollfd> events{{listener.get(), POLLIN, 0}, {budget->wake.get(), POLLIN, 0}};
    for (const auto& session : sessions) {
      const short writes = session->wants_to_write() ? POLLOUT : 0;
      events.push_back({session->socket(), static_cast<short>(POLLIN | writes), 0});
    }
    if (poll(events.data(), events.size(), kTurn) < 0 && errno != EINTR) return;
    uint64_t wakes = 0;
    if (read(budget->wake.get(), &wakes, sizeof wakes) < 0) wakes = 0;
    Arrivals arrivals;
    for (size_t i = 0; i < sessions.size(); ++i) {
      if (!Turn(*sessions[i], events[i + 2].revents, arrivals)) sessions[i].reset();
    }
    std::erase(sessions, nullptr);
    steps.DropOlder(IncomingSteps::Time::clock::now() - options.patience);
    if (!arrivals.whole.empty() || !arrivals.again.empty()) {
      MutexLock guard(mutex);
      for (ReceivedStep& step : arrivals.whole) whole.push_back(std::move(step));
      for (PartAgain& part : arrivals.again) again.push_back(std::move(part));
      wake_keeper.NotifyAll();
    }
    TellNews();
    if ((events[0].revents & POLLIN) != 0) Accept();
  }
}

void Receiver::State::LookFor(const PartAgain& part) {
  const bool stored = options.stored && options.stored(part);
  if (!stored && !part.over) return;  // the other parts may come
  MutexLock guard(mutex);
  kept.push_back({part.name, part.step,
                  stored ? Status() : Fail(ErrorCode::kNotFound, "it was dropped before")});
  budget->Wake();
}

void Receiver::State::Keep() {
  while (true) {
    ReceivedStep step;
    std::deque<PartAgain> parts;
    {
      MutexLock guard(mutex);
      while (whole.empty() && again.empty() && !finish) wake_keeper.Wait(mutex);
      if (whole.empty() && again.empty()) return;
      parts.swap(again);
      if (!whole.empty()) step = std::move(whole.front());
    }
    for (const PartAgain& part : parts) LookFor(part);
    if (step.files.empty()) continue;
    Kept outcome{step.name, step.step, {}};
    const std::string name = NameOf(step.name, step.step);
    outcome.done = Caught([&] { return options.keep(std::move(step)); });
    std::string drop;
    if (!outcome.done) {
      drop = StrCat("snapshot ", name, " dropped: ", outcome.done.error().message);
      Say(drop);
    }
    {
      MutexLock guard(mutex);
      whole.pop_front();
      if (outcome.done) {
        ++durable;
        last_durable = name;
      } else {
        ++dropped;
        last_drop = drop;
      }
      kept.push_back(std::move(outcome));
    }
    budget->Wake();
  }
}

Receiver::Receiver(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::unique_ptr<Receiver>> Receiver::Start(ReceiverOptions options) {
  auto state = std::make_unique<State>();
  state->options = std::move(options);
  state->budget->limit = state->options.memory_bytes;
  state->budget->chunk_bytes = state->options.chunk_bytes;
  state->budget->shelf = state->options.shelf;
  CKPT_RETURN_IF_ERROR(CheckArenaShape({state->options.chunk_bytes, 1}));
  CKPT_RETURN_IF_ERROR(state->Listen());
  state->keeper_thread = std::thread([raw = state.get()] { raw->Keep(); });
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
  // What is not finished now is another daemon's.
  if (state_->options.shelf) state_->options.shelf->Freeze();
  uint64_t dropped = 0;
  {
    MutexLock guard(state_->mutex);
    dropped = state_->dropped;
    state_->finish = true;
    state_->wake_keeper.NotifyAll();
  }
  state_->keeper_thread.join();
  bool finished = state_->steps.size() == 0;
  {
    MutexLock guard(state_->mutex);
    finished = finished && state_->dropped == dropped;
  }
  if (finished && state_->options.shelf) state_->options.shelf->Thaw();
  // Ours: the lock is still held.
  unlink(state_->path.c_str());
  unlink(StrCat(state_->path, ".lock").c_str());
}

std::string Receiver::StatusJson() const {
  MutexLock guard(state_->mutex);
  const nlohmann::json status{{"ranks", state_->ranks},
                              {"arena_bytes", state_->budget->used.load()},
                              {"huge_bytes", state_->budget->huge.load()},
                              {"full_drops", state_->budget->full_drops.load()},
                              {"full_waits", state_->budget->full_waits.load()},
                              {"incoming", state_->incoming},
                              {"waiting", state_->whole.size()},
                              {"durable", state_->durable},
                              {"dropped", state_->dropped},
                              {"last_durable", state_->last_durable},
                              {"last_drop", state_->last_drop}};
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace ckptfs
