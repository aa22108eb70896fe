// SPDX-License-Identifier: Apache-2.0
//
// The hand of a Landing that makes steps with other daemons.

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/landing/landing.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

using std::chrono::seconds;

constexpr seconds kScan{10};   // between looks at what other daemons left
constexpr seconds kQuiet{30};  // what did not change for so long is left

StepMaker::News InVain() { return {StepMaker::News::What::kInVain, {}}; }

}  // namespace

std::string Landing::RanksOf(const std::set<uint32_t>& ranks) {
  return StrCat(ranks.size() == 1 ? "rank " : "ranks ", RanksText(ranks));
}

// ---- what the receiver says ----------------------------------------------------

void Landing::See(const NodeRanks& mine) {
  if (worlds_->See(mine)) world_.Wake();
}

Result<JobWorld> Landing::WorldOf(const std::string& run, const std::string& job) const {
  return worlds_->WorldOf(run, job);
}

void Landing::Drop(const DroppedStep& step) {
  worlds_->Drop(step);
  world_.Wake();
}

void Landing::Leave(const std::string& run, const std::string& job) { worlds_->Leave(run, job); }

void Landing::StopWorlds() {
  {
    MutexLock lock(mutex_);
    if (phase_ == Phase::kNew) return;
  }
  if (!worlds_ || worlds_ending_.exchange(true)) return;
  world_.Stop();
  const Status done = Caught([this]() -> Status {
    WorldTurn();
    return {};
  });
  if (!done) Say(StrCat("snapshots of several nodes: ", done.error().message));
}

// ---- turns ---------------------------------------------------------------------

Worker::Time Landing::WorldTurn() {
  if (worlds_->JoinAll()) {
    worlds_moved_ = true;
    Signal();
  }
  worlds_->DropAll();
  PrepareAll();
  LookAtAll();
  std::set<Worlds::JobName> busy;
  {
    MutexLock lock(mutex_);
    for (const Save& save : saves_) {
      if (!save.all_here()) busy.emplace(save.what.name.run, save.what.name.job);
    }
  }
  worlds_->LeaveAll(busy);
  FinishOthers();
  return Clock::now() + options_.turn;
}

void Landing::FinishOthers() {
  const auto now = Clock::now();
  if (now - finished_ < kScan) return;
  finished_ = now;
  if (const Status kept = options_.commit->KeepWorlds(); !kept) Say(kept.error().message);
  const auto left = options_.commit->FinishOthers(now, kQuiet);
  if (left && *left) options_.steps->Tell(InVain());
}

// ---- parts that are made durable -----------------------------------------------

// In the order of a job: one that fails lets those behind it wait.
Landing::Save* Landing::NextToPrepare() {
  const auto now = Clock::now();
  std::set<Worlds::JobName> jobs;
  for (Save& save : saves_) {
    const bool first = save.action == LandingAction::kPrepare &&
                       jobs.emplace(save.what.name.run, save.what.name.job).second;
    if (first && (worlds_ending_ || save.tries.due <= now)) return &save;
  }
  return nullptr;
}

void Landing::PrepareAll() {
  for (;;) {
    Save* save = nullptr;
    {
      MutexLock lock(mutex_);
      save = NextToPrepare();
      if (save == nullptr) return;
      save->busy = true;
      if (save->tries.failed == 0) save->tries.begun = Clock::now();  // before, others were first
    }
    Prepare(*save);
  }
}

void Landing::Prepare(Save& save) {
  if (worlds_ending_ && Leaves(save)) return;
  auto done = Caught([&] { return WriteDown(save); });
  if (!done) return Failed(save, std::move(done).error());
  if (*done) return Conclude(save, LandingEvent::kFound, {}, std::nullopt);
  if (options_.spooler && save.bytes->on_disk()) {
    options_.spooler->Stored(*save.bytes);
  } else {  // a save that is only in memory has served its purpose
    if (options_.spooler) options_.spooler->Over(*save.bytes);
    save.bytes.reset();
  }
  Advance(save, LandingEvent::kPrepared);
}

Result<bool> Landing::IsStep(const Save& save) {
  const PreparedPart& part = save.what;
  const PartAgain left{part.name, part.step, part.ranks.front().rank, part.world,
                       {},        true,      part.Directory()};
  CKPT_ASSIGN_OR_RETURN(const auto found, options_.steps->FindStored(left));
  return found.has_value();
}

Result<bool> Landing::WriteDown(Save& save) {
  if (save.may_be_step) {
    CKPT_ASSIGN_OR_RETURN(const bool is_step, IsStep(save));
    if (is_step) return true;
  }
  if (options_.spooler && std::exchange(save.met, Meets::kStore) != Meets::kStore) {
    options_.spooler->Begin(*save.bytes);
  }
  CKPT_RETURN_IF_ERROR(options_.commit->Prepare(save.what, *save.bytes));
  return false;
}

// ---- what becomes of them ------------------------------------------------------

void Landing::LookAtAll() {
  std::vector<Save*> prepared;
  {
    MutexLock lock(mutex_);
    const auto now = Clock::now();
    for (Save& save : saves_) {
      if (save.action == LandingAction::kLook && save.tries.due <= now) prepared.push_back(&save);
    }
  }
  for (Save* const save : prepared) LookAt(*save);  // only this hand removes them
}

bool Landing::MayBeStep(Save& save, AttemptNews& news) {
  if (!save.may_be_step) return false;
  const auto found = Caught([&] { return IsStep(save); });
  if (!found && std::exchange(said_, found.error().message) != found.error().message) Say(said_);
  if (found) save.may_be_step = false;
  if (!found || !*found) return !found;
  options_.commit->Withdraw(save.what.name);
  news.state = AttemptNews::State::kDurable;
  return true;
}

Result<std::optional<AttemptNews>> Landing::NewsOf(Save& save) {
  WorldCommit& commit = *options_.commit;
  AttemptNews before;
  if (MayBeStep(save, before)) {
    const bool is = before.state == AttemptNews::State::kDurable;
    return is ? std::optional(before) : std::nullopt;
  }
  bool publish = save.what.ranks.front().rank == 0;
  if (!publish) {
    {
      MutexLock lock(mutex_);
      const bool all = ++save.turns >= save.next_look || Late(save);
      if (all) save.next_look = save.turns + std::min(save.turns, +kMostTurns);
      publish = all;
    }
    if (!publish) return commit.Glance(save.what.name);
    CKPT_ASSIGN_OR_RETURN(publish, commit.IsOurTurn(save.what.name));
    // Daemons before this one do not get on with it; the result is the same whoever publishes.
    publish = publish || Late(save);
  }
  return commit.Look(save.what.name, publish);
}

void Landing::LookAt(Save& save) {
  auto news = Caught([&] { return NewsOf(save); });
  if (news && save.tries.failed > 0) {
    MutexLock lock(mutex_);
    save.tries = {.begun = save.first};
  }
  if (news && *news) return Decided(save, **news);
  if (news) return;
  const Error& error = news.error();
  const bool lost = IsFinal(LandingAction::kLook, error.code);
  if (save.tries.failed == 0 && !lost) {
    Say(StrCat("snapshot ", save.title(), " waits: ", error.message));
  }
  bool again = false;
  if (!lost) {
    MutexLock lock(mutex_);
    // It takes up no memory; others that never come are another limit (Waits).
    again = options_.retry.Again(save.tries, Clock::now(), RetryRule::Patience::kForEver);
  }
  if (!again) DropForAll(save, error.message);
}

void Landing::Decided(Save& save, const AttemptNews& news) {
  using State = AttemptNews::State;
  if (news.state == State::kWaiting) return Waits(save, news);
  if (news.state == State::kDecided) {
    if (save.state != LandingState::kDecided) return Advance(save, LandingEvent::kDecided);
    if (!news.whole && Late(save)) DropForAll(save, "its manifest and a part of it are gone");
    return;
  }
  if (news.state == State::kDropped) {
    return Conclude(save, LandingEvent::kRefused, Fail(ErrorCode::kIo, news.why), InVain());
  }
  using What = StepMaker::News::What;
  std::optional<StepMaker::News> told;
  if (news.record) {
    told = StepMaker::News{news.published ? What::kPublished : What::kHeard, *news.record};
  }
  Conclude(save, LandingEvent::kPublished, {}, told);
}

void Landing::Waits(Save& save, const AttemptNews& news) {
  {
    MutexLock lock(mutex_);
    save.missing = news.missing;
  }
  if (!news.passed.empty()) {
    return DropForAll(save, DropApart(save, news.later)
                                ? std::string(kApart)
                                : StrCat(RanksOf(news.passed), " went on without it"));
  }
  if (!news.whole && Late(save)) {
    DropForAll(save, StrCat("nothing came from ", RanksOf(news.missing)));
  }
}

void Landing::DropForAll(Save& save, const std::string& why) {
  using State = AttemptNews::State;
  const auto news =
      Caught([&] { return options_.commit->Drop(save.what.name, save.what.step, why); });
  if (news && (news->state == State::kDurable || news->state == State::kDropped)) {
    return Decided(save, *news);
  }
  if (Late(save)) Conclude(save, LandingEvent::kGaveUp, Fail(ErrorCode::kIo, why), std::nullopt);
}

bool Landing::DropApart(const Save& save, const std::map<uint64_t, uint64_t>& later) {
  bool apart = false;
  for (const auto& [attempt, step] : later) {
    const AttemptName& name = save.what.name;
    if (step != save.what.step || TurnOf(attempt) <= TurnOf(name.attempt)) continue;
    AttemptName theirs = name;
    theirs.attempt = attempt;
    const auto dropped =
        Caught([&] { return options_.commit->Drop(theirs, step, std::string(kApart)); });
    if (!dropped || dropped->state != AttemptNews::State::kDropped) continue;
    apart = true;
    const Status done = Fail(ErrorCode::kIo, std::string(kApart));
    {
      MutexLock lock(mutex_);
      Tally(StrCat(name.run, "/", step), save.first, LandingEvent::kRefused, done);
      news_.over.push_back({{name.run, name.job, attempt},
                            step,
                            done,
                            PreparedPart{theirs, step, 0, 0, {}}.Directory()});
    }
    Say(StrCat("snapshot ", name.run, "/", step, " dropped: ", kApart));
    Signal();
  }
  return apart;
}

}  // namespace ckptfs
