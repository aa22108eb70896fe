// SPDX-License-Identifier: Apache-2.0
//
// The ranks' thread of a Receiver.

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/runtime_directory.h"
#include "core/base/single_flight.h"
#include "snapshot/receive/receiver_state.h"

namespace ckptfs {
namespace {

constexpr std::chrono::milliseconds kTick{1000};
constexpr std::chrono::milliseconds kMoment{10};
constexpr size_t kAcceptsPerTurn = 64;
constexpr size_t kMaxStrangers = 256;
constexpr size_t kOwnEvents = 3;  // before those of sessions
// Lines of dropped steps in the log between two ticks.
constexpr uint64_t kSaidDrops = 100;
constexpr std::string_view kSilent = "it said no hello";
// Smaller ones end at once.
constexpr uint64_t kSmallArena = uint64_t{64} << 20;

}  // namespace

std::vector<pollfd> Receiver::State::Events(bool& rests) {
  const auto now = Clock::now();
  arrivals_limit.Pass(now);
  rests = accepts && !arrivals_limit.Allows();
  const short accepting = accepts && !rests ? POLLIN : 0;
  std::vector<pollfd> events{{listener.get(), accepting, 0},
                             {budget->wake.get(), POLLIN, 0},
                             {options.landing->descriptor(), POLLIN, 0}};
  for (const auto& session : sessions) {
    rests = !session->Pass(now) || rests;
    const short reads = session->wants_to_read() ? POLLIN : 0;
    const short writes = session->wants_to_write() ? POLLOUT : 0;
    events.push_back({session->socket(), static_cast<short>(reads | writes), 0});
  }
  for (const auto& session : sessions) events.push_back({session->process(), POLLIN, 0});
  leavers.AddTo(events);
  return events;
}

void Receiver::State::Serve() {
  Landing& landing = *options.landing;
  while (!stopping) {
    bool rests = false;
    std::vector<pollfd> events = Events(rests);
    const auto before = TimeSinceBoot();
    const auto longest = rests ? kMoment : kTick;
    const int wait = std::exchange(hurries, false) ? 0 : static_cast<int>(longest.count());
    const bool polled = poll(events.data(), events.size(), wait) >= 0;
    if (!polled && errno != EINTR) return;
    uint64_t wakes = 0;
    if (read(budget->wake.get(), &wakes, sizeof wakes) < 0) wakes = 0;
    landing.Hear();
    // First: who leaves now was here when the others were known.
    if (landing.TakeWorldsMoved()) SeeWorlds();
    Arrivals arrivals;
    const size_t count = sessions.size();
    for (size_t i = 0; i < count; ++i) {
      const int happened = events[i + kOwnEvents].revents | events[count + i + kOwnEvents].revents;
      if (polled && happened == 0) sessions[i]->Saw(before);
      if (Turn(*sessions[i], static_cast<short>(happened), arrivals)) continue;
      Forget(*sessions[i]);
      sessions[i].reset();
    }
    std::erase(sessions, nullptr);
    ReapArenas();
    somebody_left = steps.End(leavers.TakeEnded(TimeSinceBoot())) || somebody_left;
    LeaveLives();
    const auto now = Clock::now();
    const bool ticks = now >= next_tick;
    if (ticks) Tick();
    hurries = steps.DropOlder(now - options.patience,
                              [this](const AttemptName& name) { return Elsewhere(name); });
    for (ReceivedStep& step : arrivals.whole) landing.Take(PartOf(std::move(step)));
    landing.Ask(std::move(arrivals.again));
    std::set<AttemptName> moved = steps.TakeMoved();
    moved.merge(unspread);
    unspread.clear();
    if (landing.has_worlds()) Spread(moved);
    if (landing.has_worlds() && ticks) SeeWorlds();
    UpdateLines(moved);
    TellNews();
    if ((events[0].revents & POLLIN) != 0) Accept();
  }
}

void Receiver::State::Tick() {
  next_tick = Clock::now() + kTick;
  accepts = true;
  if (unsaid_drops > 0) Say(StrCat("snapshots: ", unsaid_drops, " more were dropped"));
  said_drops = unsaid_drops = 0;
  for (auto& session : sessions) {
    if (session->greets() || session->began() + options.hello > Clock::now()) continue;
    const SnapshotMessage refused{.word = SnapshotWord::kRefused, .text = std::string(kSilent)};
    (void)SendSnapshotMessage(session->socket(), refused);
    Forget(*session);
    session.reset();
  }
  std::erase(sessions, nullptr);
  ForgetJobs();
  if (std::exchange(somebody_left, false)) steps.ForgetJobs();
}

// ---- sessions ------------------------------------------------------------------

void Receiver::State::Accept() {
  for (size_t i = 0; i < kAcceptsPerTurn && arrivals_limit.Allows(); ++i) {
    arrivals_limit.Use();
    Descriptor connection(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) {
      accepts = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED;
      return;
    }
    if (!IsPeerTrusted(connection.get())) {
      SnapshotMessage refused{SnapshotWord::kRefused};
      refused.text = "the daemon takes snapshots only from its own user and root";
      (void)SendSnapshotMessage(connection.get(), refused);
      continue;
    }
    if (sessions.size() - budget->ranks.all() >= kMaxStrangers) SendStrangerAway();
    sessions.push_back(
        std::make_unique<RankSession>(std::move(connection), ++last_number, Clock::now(), budget));
    by_number.emplace(last_number, sessions.back().get());
    MutexLock guard(mutex);
    ranks = sessions.size();  // before it is welcomed
  }
}

void Receiver::State::SendStrangerAway() {
  std::map<int, size_t> of;
  for (const auto& session : sessions) of[session->peer()] += session->introduced() ? 0 : 1;
  const auto most = std::ranges::max_element(of, {}, [](const auto& one) { return one.second; });
  const auto away = std::ranges::find_if(sessions, [&](const auto& session) {
    return !session->introduced() && session->peer() == most->first;
  });
  if (away == sessions.end()) return;
  const SnapshotMessage refused{
      .word = SnapshotWord::kRefused, .sequence = 1, .text = std::string(kSilent)};
  (void)SendSnapshotMessage((*away)->socket(), refused);
  Forget(**away);
  sessions.erase(away);
}

void Receiver::State::Greeted(RankSession& session) {
  of_job[{session.run(), session.job()}].insert(&session);
  if (options.landing->has_worlds()) SeeJob(session);
}

void Receiver::State::Forget(RankSession& session) {
  by_number.erase(session.number());
  for (AttemptName& name : options.landing->ForgetOver(session.number())) {
    unspread.insert(std::move(name));
  }
  const auto job = of_job.find({session.run(), session.job()});
  if (job != of_job.end()) {
    job->second.erase(&session);
    if (job->second.empty()) of_job.erase(job);
  }
  if (auto making = session.TakeMaking()) {
    *making->ends = true;
    budget->ending += making->shape.bytes();
    unwanted.push_back(*std::move(making));
  }
  if (auto hold = session.TakeHold()) EndArena(std::move(hold));
}

// In a thread of its own: the kernel takes a second for some gigabytes.
void Receiver::State::EndArena(std::shared_ptr<ArenaHold> hold) {
  const uint64_t bytes = hold->reader().shape().bytes();
  if (bytes < kSmallArena) return;
  budget->ending += bytes;
  auto over = std::make_shared<std::atomic<bool>>(false);
  endings.push_back(
      {over, std::thread([hold = std::move(hold), over, bytes, to = budget]() mutable {
         hold.reset();
         to->ending -= bytes;
         *over = true;
         to->Wake();
       })});
}

void Receiver::State::ReapArenas() {
  std::erase_if(endings, [](Ending& ending) {
    if (!*ending.over) return false;
    ending.thread.join();
    return true;
  });
  std::erase_if(unwanted, [this](ArenaMaking& making) {
    if (!making.Ready()) return false;
    making.thread.join();
    budget->used -= making.shape.bytes();
    budget->ending -= making.shape.bytes();
    return true;
  });
}

bool Receiver::State::Turn(RankSession& session, short events, Arrivals& arrivals) {
  std::string why = "went away before its part was whole";
  const bool known = session.introduced();
  const auto outcome = Caught([&]() -> Result<bool> {
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0) {
      CKPT_ASSIGN_OR_RETURN(const bool there, session.Receive(steps, arrivals));
      if (!there) return false;
    }
    CKPT_RETURN_IF_ERROR(session.Advance(steps));
    return true;
  });
  if (!known && session.introduced()) Greeted(session);
  if (outcome && *outcome) return true;
  somebody_left = true;
  if (!outcome) {
    why = outcome.error().message;
    const bool later = outcome.error().code == ErrorCode::kExists;
    if (!later) {
      Say(StrCat("snapshots of ", session.introduced() ? session.run() : "a stranger", ": ", why));
    }
    const uint64_t sequence = later ? 1 : 0;
    const SnapshotMessage refused{
        .word = SnapshotWord::kRefused, .sequence = sequence, .text = why};
    (void)SendSnapshotMessage(session.socket(), refused);
    if (outcome.error().code == ErrorCode::kExhausted) session.Refuse(steps, why);
  }
  session.Leave(steps, why);
  if (auto left = session.Left()) {
    leavers.Add(std::move(left->first), session.peer(), std::move(left->second), TimeSinceBoot());
  }
  return false;
}

// ---- what it tells -------------------------------------------------------------

void Receiver::State::UpdateLines(const std::set<AttemptName>& moved) {
  for (const AttemptName& name : moved) {
    const auto waiting = steps.Find(name);
    std::string line;
    if (waiting && waiting->untaken) {
      line = StrCat(TitleOf(name, waiting->step), ": waiting for rank",
                    waiting->here->Missing(waiting->world) == 1 ? " " : "s ",
                    waiting->here->MissingText(waiting->world));
    }
    MutexLock guard(mutex);
    if (line.empty()) {
      incomplete.erase(name);
    } else {
      incomplete[name] = std::move(line);
    }
  }
}

void Receiver::State::Tell(const AttemptName& name, uint64_t step, SnapshotWord word,
                           const std::string& text, uint64_t greetings) {
  const auto job = of_job.find({name.run, name.job});
  if (job == of_job.end()) return;
  for (RankSession* session : job->second) {
    if (session->greeting() > greetings) continue;
    SnapshotMessage message{.word = word, .step = step, .attempt = name.attempt, .text = text};
    message.sequence = word == SnapshotWord::kDropped && text == kApart ? 1 : 0;
    session->Say(std::move(message));
  }
}

void Receiver::State::TellDrop(const DroppedStep& one) {
  Tell(one.name, one.step, SnapshotWord::kDropped, one.why, one.greetings);
  if (one.again) return;
  if (!one.earlier) DropElsewhere(one);  // there, too, the name may be another save's by now
  const std::string line = StrCat("snapshot ", TitleOf(one.name, one.step), " dropped: ", one.why);
  if (said_drops < kSaidDrops) {
    ++said_drops;
    Say(line);
  } else {
    ++unsaid_drops;
  }
  options.landing->NoteDrop(line);
}

// Tells what was kept or dropped meanwhile.
void Receiver::State::TellNews() {
  const Landing::News news = options.landing->TakeNews();
  for (const auto& [number, name] : news.answered) {
    const auto asker = by_number.find(number);
    if (asker != by_number.end()) asker->second->Answered();
    unspread.insert(name);
    hurries = true;
  }
  for (const Landing::Outcome& one : news.over) {
    steps.Forget(one.name);
    Tell(one.name, one.step, one.done ? SnapshotWord::kDurable : SnapshotWord::kDropped,
         one.done ? one.place : one.done.error().message, steps.greetings());
  }
  for (const DroppedStep& one : steps.TakeDropped()) TellDrop(one);
  UpdateLines(steps.TakeMoved());
  MutexLock guard(mutex);  // last: who sees that nothing is left sees what became of it
  incoming = steps.size();
  ranks = sessions.size();
}

}  // namespace ckptfs
