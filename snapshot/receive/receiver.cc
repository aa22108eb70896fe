// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/receiver.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/file_lock.h"
#include "core/base/mutex.h"
#include "core/base/runtime_directory.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/receive/leavers.h"
#include "snapshot/wire/protocol.h"
#include "snapshot/receive/rank_session.h"
#include "snapshot/landing/world_parts.h"

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
  // The ranks that each job has or had here while it is here; by run and job.
  std::map<std::pair<std::string, std::string>, NodeRanks> jobs;
  std::unique_ptr<WorldParts> parts;  // null: all ranks have to be here
  bool somebody_left = false;         // since jobs were last forgotten
  Leavers leavers;

  struct Kept {
    AttemptName name;
    uint64_t step = 0;
    Status done;
  };
  Mutex mutex;
  CondVar wake_keeper;
  std::deque<ReceivedStep> whole GUARDED_BY(mutex);  // the first is being kept
  std::deque<PartAgain> again GUARDED_BY(mutex);     // to be looked for in the store
  std::multiset<AttemptName> looked_for GUARDED_BY(mutex);  // of these
  std::vector<Kept> kept GUARDED_BY(mutex);
  bool finish GUARDED_BY(mutex) = false;
  uint64_t durable GUARDED_BY(mutex) = 0;
  uint64_t dropped GUARDED_BY(mutex) = 0;
  uint64_t incoming GUARDED_BY(mutex) = 0;
  uint64_t ranks GUARDED_BY(mutex) = 0;
  std::vector<std::string> incomplete GUARDED_BY(mutex);
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
  // Those that an earlier daemon left in the spool are the first to be kept.
  void TakeLeft();
  // A step that is whole; from now on a spool may have it.
  void Take(ReceivedStep step);
  bool Waits(const AttemptName& name);
  void Say(std::string_view line) const {
    if (options.log) options.log(line);
  }
  void SeeJobs();
  void ForgetJobs();
  // Hands over what has ended of steps that other daemons have ranks of.
  void Spread();
  std::set<uint32_t> Elsewhere(const AttemptName& name) const;
  std::shared_ptr<BlobStream> Stream(PreparedPart part, std::weak_ptr<const void> owner) const;
  void DropElsewhere(const DroppedStep& step);
  void StartParts();
  std::vector<std::string> WaitingLines() const;
  // `drop`: why not; empty: it is durable.
  void Count(const std::string& title, const std::string& drop) EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Tell(const AttemptName& name, uint64_t step, SnapshotWord word, const std::string& text, uint64_t greetings);
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
      refused.text = "the daemon takes snapshots only from its own user and root";
    if (sessions.size() >= options.max_sessions) {
      refused.text = "too many ranks";
      refused.sequence = 1;  // later there may be room
    }
    if (refused.text.empty()) {
      sessions.push_back(std::make_unique<RankSession>(std::move(connection), budget));
      MutexLock guard(mutex);
      ranks = sessions.size();  // before it is welcomed
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
  somebody_left = true;
  if (!outcome) {
    why = outcome.error().message;
    const bool later = outcome.error().code == ErrorCode::kExists;
    if (!later) {
      Say(StrCat("snapshots of ", session.introduced() ? session.run() : "a stranger", ": ", why));
    }
    const uint64_t sequence = later ? 1 : 0;
    const SnapshotMessage refused{.word = SnapshotWord::kRefused, .sequence = sequence, .text = why};
    (void)SendSnapshotMessage(session.socket(), refused);
    if (outcome.error().code == ErrorCode::kExhausted) session.Refuse(steps, why);
  }
  session.Leave(steps, why);
  if (auto left = session.Left()) leavers.Add(std::move(left->first), std::move(left->second), TimeSinceBoot());
  return false;
}

void Receiver::State::Tell(const AttemptName& name, uint64_t step, SnapshotWord word,
                           const std::string& text, uint64_t greetings) {
  for (const auto& session : sessions) {
    if (session->run() != name.run || session->job() != name.job || session->greeting() > greetings) continue;
    SnapshotMessage message{.word = word, .step = step, .attempt = name.attempt, .text = text};
    message.sequence = word == SnapshotWord::kDropped && text == kApart ? 1 : 0;
    session->Say(std::move(message));
  }
}

// "run/7: waiting for ranks 2-3" of each step that has ranks which have not ended.
std::vector<std::string> Receiver::State::WaitingLines() const {
  std::vector<std::string> lines;
  for (const auto& waiting : steps.waiting()) {
    if (waiting.ended.empty()) continue;
    std::set<uint32_t> missing;
    for (uint32_t rank = 0; rank < waiting.world; ++rank) {
      if (!waiting.ended.contains(rank) && !waiting.taken.contains(rank)) missing.insert(rank);
    }
    lines.push_back(StrCat(NameOf(waiting.name, waiting.step), ": waiting for rank",
                           missing.size() == 1 ? " " : "s ", RanksText(missing)));
  }
  return lines;
}

// Tells what was kept or dropped meanwhile.
void Receiver::State::TellNews() {
  std::vector<Kept> news;
  std::vector<std::string> lines = WaitingLines();
  {
    MutexLock guard(mutex);
    incomplete = std::move(lines);
    news = std::exchange(kept, {});
  }
  for (const Kept& one : news) {
    steps.Forget(one.name);
    Tell(one.name, one.step, one.done ? SnapshotWord::kDurable : SnapshotWord::kDropped,
         one.done ? "" : one.done.error().message, steps.greetings());
  }
  for (const DroppedStep& one : steps.TakeDropped()) {
    const std::string line = StrCat("snapshot ", NameOf(one.name, one.step), " dropped: ", one.why);
    Tell(one.name, one.step, SnapshotWord::kDropped, one.why, one.greetings);
    if (one.again) continue;
    if (!one.earlier) DropElsewhere(one);  // there, too, the name may be another save's by now
    Say(line);
    MutexLock guard(mutex);
    ++dropped;
    last_drop = line;
  }
  MutexLock guard(mutex);  // last: a caller that sees nothing left sees what became of it
  incoming = steps.size();
  ranks = sessions.size();
}

// ---- steps of several daemons --------------------------------------------------

void Receiver::State::SeeJobs() {
  for (const auto& name : steps.TakeRenewed()) {
    if (jobs.erase(name) != 0) parts->Leave(name.first, name.second);
  }
  for (const auto& session : sessions) {
    if (!session->introduced() || session->world() == 1) continue;
    const std::pair name(session->run(), session->job());
    NodeRanks& job =
        jobs.try_emplace(name, NodeRanks{name.first, name.second, session->world(), "", {}})
            .first->second;
    job.ranks[session->rank()] = session->life();
  }
  for (const auto& [name, job] : jobs) {
    const auto world = parts->WorldOf(name.first, name.second);
    if (world && world->life) steps.Meet({name.first, name.second});
  }
}

void Receiver::State::ForgetJobs() {
  std::set<std::pair<std::string, std::string>> used;
  for (const auto& session : sessions) used.emplace(session->run(), session->job());
  for (const auto& waiting : steps.waiting()) used.emplace(waiting.name.run, waiting.name.job);
  for (auto at = jobs.begin(); at != jobs.end();) {
    if (used.contains(at->first)) {
      ++at;
      continue;
    }
    parts->Leave(at->first.first, at->first.second);
    at = jobs.erase(at);
  }
}

void Receiver::State::Spread() {
  std::multiset<AttemptName> open;  // attempts that may be stored already
  {
    MutexLock guard(mutex);
    open = looked_for;
    for (const Kept& one : kept) open.insert(one.name);
  }
  for (const auto& waiting : steps.waiting()) {
    const AttemptName& name = waiting.name;
    const auto job = jobs.find({name.run, name.job});
    if (job == jobs.end() || waiting.ended.empty() || open.contains(name)) continue;
    if (job->second.ranks.size() >= waiting.world) continue;  // all are here
    parts->See(job->second);
    const auto world = parts->WorldOf(name.run, name.job);
    if (!world) steps.Drop(name, waiting.step, world.error().message);
    if (!world || !world->life) continue;
    bool all = true;
    for (uint32_t rank = 0; rank < waiting.world && all; ++rank) {
      all = waiting.ended.contains(rank) || waiting.taken.contains(rank) ||
            world->elsewhere.contains(rank);
    }
    if (!all || steps.DropUnmet(name)) continue;
    IncomingSteps::Part part = steps.Take(name);
    WorldPart mine{name, waiting.step, waiting.world, std::move(part.files), part.first};
    if (options.spooler != nullptr) {
      AttemptName lived = name;
      lived.life = *world->life;
      mine.save = std::make_shared<SaveBytes>(std::move(lived), mine.step, mine.world);
      for (auto& [rank, file] : mine.files) CKPT_CHECK(mine.save->Add(rank, file));
    }
    parts->Hand(std::move(mine));
  }
}

std::set<uint32_t> Receiver::State::Elsewhere(const AttemptName& name) const {
  std::set<uint32_t> found;
  const auto world = parts ? parts->WorldOf(name.run, name.job) : JobWorld();
  if (!world) return found;
  for (const auto& [rank, host] : world->elsewhere) found.insert(rank);
  return found;
}

// Writes it under the name that it will have: the job's ranks are here, or all are known.
// Not beside a save that waits: its store would be slower, and this save may go to a spool.
std::shared_ptr<BlobStream> Receiver::State::Stream(PreparedPart part,
                                                    std::weak_ptr<const void> owner) const {
  if (options.spooler != nullptr && options.spooler->waits()) return nullptr;
  const auto job = jobs.find({part.name.run, part.name.job});
  if (parts && (job == jobs.end() || job->second.ranks.size() < part.world)) {
    const auto world = parts->WorldOf(part.name.run, part.name.job);
    if (world && world->life) part.name.life = *world->life;
  }
  const PreparedRank& rank = part.ranks.front();
  return options.stream(part.PathOf(rank.rank), rank.bytes, std::move(owner));
}

void Receiver::State::DropElsewhere(const DroppedStep& step) {
  const auto job = jobs.find({step.name.run, step.name.job});
  if (!parts || job == jobs.end() || job->second.ranks.size() >= job->second.world) return;
  parts->See(job->second);
  parts->Drop(step);
}

void Receiver::State::StartParts() {
  if (options.commit == nullptr) return;
  WorldPartsOptions of;
  of.commit = options.commit;
  of.patience = options.patience;
  of.turn = options.turn;
  of.stored = options.shown;
  of.spooler = options.spooler;
  of.found = [this](const SaveBytes& save) {
    const PreparedPart& part = save.part();
    const PartAgain left{part.name,  part.step, part.ranks.front().rank,
                         part.world, {},        true, part.Directory()};
    return options.stored && options.stored(left);
  };
  of.reclaim = options.reclaim;
  of.log = options.log;
  of.wake = [this] { budget->Wake(); };
  of.settled = [this](const AttemptName& name, uint64_t step, const Status& done) {
    const std::string title = NameOf(name, step);
    const std::string drop =
        done ? "" : StrCat("snapshot ", title, " dropped: ", done.error().message);
    if (!done) Say(drop);
    {
      MutexLock guard(mutex);
      Count(title, drop);
      kept.push_back({name, step, done});
    }
    budget->Wake();
  };
  parts = std::make_unique<WorldParts>(std::move(of));
}

void Receiver::State::Serve() {
  while (!stopping) {
    std::vector<pollfd> events{{listener.get(), POLLIN, 0}, {budget->wake.get(), POLLIN, 0}};
    for (const auto& session : sessions) {
      const short writes = session->wants_to_write() ? POLLOUT : 0;
      events.push_back({session->socket(), static_cast<short>(POLLIN | writes), 0});
    }
    for (const auto& session : sessions) events.push_back({session->process(), POLLIN, 0});
    leavers.AddTo(events);
    const auto before = TimeSinceBoot();
    const bool polled = poll(events.data(), events.size(), kTurn) >= 0;
    if (!polled && errno != EINTR) return;
    uint64_t wakes = 0;
    if (read(budget->wake.get(), &wakes, sizeof wakes) < 0) wakes = 0;
    Arrivals arrivals;
    const size_t count = sessions.size();
    for (size_t i = 0; i < count; ++i) {
      const int happened = events[i + 2].revents | events[count + i + 2].revents;
      if (polled && happened == 0) sessions[i]->Saw(before);
      if (!Turn(*sessions[i], static_cast<short>(happened), arrivals)) sessions[i].reset();
    }
    std::erase(sessions, nullptr);
    somebody_left = steps.End(leavers.TakeEnded(TimeSinceBoot())) || somebody_left;
    steps.DropOlder(IncomingSteps::Time::clock::now() - options.patience,
                    [this](const AttemptName& name) { return Elsewhere(name); });
    if (parts) SeeJobs();
    for (ReceivedStep& step : arrivals.whole) Take(std::move(step));
    if (!arrivals.again.empty()) {
      MutexLock guard(mutex);
      for (PartAgain& part : arrivals.again) {
        looked_for.insert(part.name);
        again.push_back(std::move(part));
      }
      wake_keeper.NotifyAll();
    }
    if (parts) Spread();
    TellNews();
    if (parts) ForgetJobs();
    if (std::exchange(somebody_left, false)) steps.ForgetJobs();
    if ((events[0].revents & POLLIN) != 0) Accept();
  }
}

void Receiver::State::Count(const std::string& title, const std::string& drop) {
  if (drop.empty()) {
    ++durable;
    last_durable = title;
  } else {
    ++dropped;
    last_drop = drop;
  }
}

void Receiver::State::Take(ReceivedStep step) {
  if (options.spooler != nullptr) {
    AttemptName name = step.name;
    name.life = step.life;
    const auto world = static_cast<uint32_t>(step.files.size());
    step.save = std::make_shared<SaveBytes>(std::move(name), step.step, world);
    for (uint32_t rank = 0; rank < world; ++rank) {
      CKPT_CHECK(step.save->Add(rank, step.files[rank]));
    }
    {
      MutexLock guard(mutex);
      // A rank that was not told repeats what the spool has.
      const auto same = [&](const ReceivedStep& one) { return IsSameSave(one, step); };
      if (std::any_of(whole.begin(), whole.end(), same)) return;
    }
    options.spooler->Add(step.save);
    if (options.waits) options.waits(step);
  }
  MutexLock guard(mutex);
  whole.push_back(std::move(step));
  wake_keeper.NotifyAll();
}

void Receiver::State::TakeLeft() {
  for (const auto& save : options.spooler->left()) {
    const PreparedPart& part = save->part();
    AttemptName name = part.name;
    name.life = {};
    std::map<uint32_t, ReceivedFile> files;
    for (const PreparedRank& rank : part.ranks) {
      files[rank.rank] = ReceivedFile{rank.bytes, {}, rank.chunks, true, nullptr};
    }
    if (files.size() < part.world) {
      if (!parts) continue;
      steps.Keep(name);
      parts->Hand({name, part.step, part.world, std::move(files), IncomingSteps::Time::clock::now(), save});
      continue;
    }
    steps.Keep(name);
    ReceivedStep step{name, part.step, {}, {}, save};
    for (auto& [rank, file] : files) step.files.push_back(std::move(file));
    if (options.waits) options.waits(step);
    MutexLock guard(mutex);
    whole.push_back(std::move(step));
  }
}

bool Receiver::State::Waits(const AttemptName& name) {
  if (parts && parts->Has(name)) return true;
  MutexLock guard(mutex);
  return std::any_of(whole.begin(), whole.end(),
                     [&](const ReceivedStep& step) { return step.save && step.name == name; });
}

void Receiver::State::LookFor(const PartAgain& part) {
  if (!part.place.empty() && Waits(part.name)) return;  // it is told when that is over
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
    std::deque<PartAgain> returned;
    {
      MutexLock guard(mutex);
      while (whole.empty() && again.empty() && !finish) wake_keeper.Wait(mutex);
      if (whole.empty() && again.empty()) return;
      returned.swap(again);
      // A step with a save is copied: the queue must still have its name while it is kept.
      if (!whole.empty()) step = whole.front().save ? whole.front() : std::move(whole.front());
    }
    for (const PartAgain& part : returned) LookFor(part);
    if (!returned.empty()) {
      MutexLock guard(mutex);
      for (const PartAgain& part : returned) looked_for.erase(looked_for.find(part.name));
      budget->Wake();
    }
    if (step.files.empty()) continue;
    Kept outcome{step.name, step.step, {}};
    const std::string name = NameOf(step.name, step.step);
    const auto save = step.save;
    outcome.done = Caught([&] { return options.keep(std::move(step)); });
    if (save && save->stays()) {
      MutexLock guard(mutex);
      whole.pop_front();
      continue;
    }
    std::string drop;
    if (!outcome.done) {
      drop = StrCat("snapshot ", name, " dropped: ", outcome.done.error().message);
      Say(drop);
    }
    {
      MutexLock guard(mutex);
      whole.pop_front();
      Count(name, drop);
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
  if (state->options.stream) {
    state->budget->stream = std::bind_front(&Receiver::State::Stream, state.get());
  }
  state->StartParts();
  if (state->options.spooler != nullptr) state->TakeLeft();
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
  if (state_->parts) state_->parts->Stop();  // the keeper may ask about them
  // Another daemon will finish what is not finished now.
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
  // The socket is ours: the lock is still held.
  unlink(state_->path.c_str());
  unlink(StrCat(state_->path, ".lock").c_str());
}

std::string Receiver::StatusJson() const {
  auto lines = state_->parts ? state_->parts->Waiting() : std::vector<std::string>();
  MutexLock guard(state_->mutex);
  lines.insert(lines.end(), state_->incomplete.begin(), state_->incomplete.end());
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
                              {"last_drop", state_->last_drop},
                              {"steps", lines}};
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace ckptfs
