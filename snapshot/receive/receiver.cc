// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/receiver.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/runtime_directory.h"
#include "core/base/single_flight.h"
#include "snapshot/receive/receiver_state.h"

namespace ckptfs {
namespace {

constexpr size_t kStatusLines = 100;
// A quarter of the time after which a store that failed is asked again (QuestionQueue::Spent).
constexpr std::chrono::milliseconds kStoreRests{250};

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

void Receiver::State::Count(const std::string& title, const std::string& drop) {
  if (drop.empty()) {
    ++durable;
    last_durable = title;
  } else {
    ++dropped;
    last_drop = drop;
  }
}

void Receiver::State::CountUnproved(bool is) {
  MutexLock guard(mutex);
  unproved += is ? 1 : 0;
}

void Receiver::State::Take(ReceivedStep step) {
  ProtectWhole(options.protect, step);
  CountUnproved(std::ranges::any_of(step.files, [](auto& file) { return file.unproved > 0; }));
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
      parts->Hand(
          {name, part.step, part.world, std::move(files), IncomingSteps::Time::clock::now(), save});
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
  const auto begin = Clock::now();
  // One that waits is told when that is over.
  const bool waits = !part.place.empty() && Waits(part.name);
  const bool looks = !waits && options.stored;
  const Result<bool> looked = looks ? Caught([&] { return options.stored(part); }) : false;
  const bool stored = looked && *looked;
  if (!looked) Say(looked.error().message);
  {
    MutexLock guard(mutex);
    questions.Spent(Clock::now() - begin);
    if (!looked && part.over) {  // nobody else knows what became of it
      questions.Spent(kStoreRests);
      questions.Add(part);
      return;
    }
    looked_for.erase(looked_for.find(part.name));
    answered.emplace_back(part.asker, part.name);
    if (stored || (part.over && !waits)) {
      kept.push_back({part.name, part.step,
                      stored ? Status() : Fail(ErrorCode::kNotFound, "it was dropped before")});
    }  // else the other parts may come
  }
  budget->Wake();
}

void Receiver::State::Keep() {
  while (true) {
    ReceivedStep step;
    std::optional<PartAgain> question;
    {
      MutexLock guard(mutex);
      while (!finish && whole.empty()) {
        const auto now = Clock::now();
        question = questions.Next(now);
        if (question) break;
        if (questions.empty()) {
          wake_keeper.Wait(mutex);
        } else {
          wake_keeper.WaitUntil(mutex, questions.Due(now));
        }
      }
      if (!question && !finish) question = questions.Next(Clock::now());
      if (!question && whole.empty()) return;
      // A step with a save is copied: the queue must still have its name while it is kept.
      if (!question) step = whole.front().save ? whole.front() : std::move(whole.front());
    }
    if (question) {
      LookFor(*question);
    } else {
      KeepStep(std::move(step));
    }
  }
}

void Receiver::State::KeepStep(ReceivedStep step) {
  Kept outcome{step.name, step.step, {}, step.Place()};
  const std::string title = TitleOf(step.name, step.step);
  const auto save = step.save;
  outcome.done = Caught([&] { return options.keep(std::move(step)); });
  if (save && save->stays()) {
    MutexLock guard(mutex);
    whole.pop_front();
    return;
  }
  std::string drop;
  if (!outcome.done) {
    drop = StrCat("snapshot ", title, " dropped: ", outcome.done.error().message);
    Say(drop);
  }
  {
    MutexLock guard(mutex);
    whole.pop_front();
    Count(title, drop);
    kept.push_back(std::move(outcome));
  }
  budget->Wake();
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
  for (const auto& session : state_->sessions) {
    auto making = session->TakeMaking();
    if (!making) continue;
    *making->ends = true;
    state_->unwanted.push_back(*std::move(making));
  }
  for (ArenaMaking& one : state_->unwanted) one.thread.join();
  for (State::Ending& one : state_->endings) one.thread.join();
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
  for (const auto& [name, line] : state_->incomplete) {
    if (lines.size() >= kStatusLines) break;
    lines.push_back(line);
  }
  if (lines.size() >= kStatusLines) lines.push_back("...");
  const nlohmann::json status{{"ranks", state_->ranks},
                              {"arena_bytes", state_->budget->used.load()},
                              {"huge_bytes", state_->budget->huge.load()},
                              {"full_drops", state_->budget->full_drops.load()},
                              {"full_waits", state_->budget->full_waits.load()},
                              {"incoming", state_->incoming},
                              {"waiting", state_->whole.size()},
                              {"durable", state_->durable},
                              {"dropped", state_->dropped},
                              {"unproved", state_->unproved},
                              {"last_durable", state_->last_durable},
                              {"last_drop", state_->last_drop},
                              {"steps", lines}};
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace ckptfs
