// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/world_parts.h"

#include <algorithm>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/io/memory_root.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

using std::chrono::seconds;

constexpr seconds kScan{10};   // between looks at what other daemons left
constexpr seconds kQuiet{30};  // what did not change for so long is left

AttemptName Lived(AttemptName name, const Digest& life) {
  name.life = life;
  return name;
}

// True unless the failure may pass.
bool IsFinal(const Error& error) {
  return error.code == ErrorCode::kInvalid || error.code == ErrorCode::kExists ||
         error.code == ErrorCode::kDataLoss;
}

std::string Missing(const std::set<uint32_t>& ranks) {
  return StrCat(ranks.size() == 1 ? "rank " : "ranks ", RanksText(ranks));
}

}  // namespace

WorldParts::WorldParts(WorldPartsOptions options) : options_(std::move(options)) {
  thread_ = std::thread([this] { Run(); });
}

WorldParts::~WorldParts() { Stop(); }

void WorldParts::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    moved_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void WorldParts::Say(const std::string& line) const {
  if (options_.log) options_.log(line);
}

// ---- what the receiver says ----------------------------------------------------

void WorldParts::See(const NodeRanks& mine) {
  MutexLock lock(mutex_);
  Job& job = jobs_[{mine.run, mine.job}];
  if (job.mine == mine && job.world && job.world->life) return;
  const bool added = job.mine != mine;
  job.mine = mine;
  job.changed = true;
  job.leaves = false;
  if (!added) return;
  job.world = JobWorld();  // it may be that of other lives
  asked_ = true;
  moved_.NotifyAll();
}

Result<JobWorld> WorldParts::WorldOf(const std::string& run, const std::string& job) const {
  MutexLock lock(mutex_);
  const auto found = jobs_.find({run, job});
  return found == jobs_.end() ? JobWorld() : found->second.world;
}

void WorldParts::Hand(WorldPart part) {
  const auto save = part.save;
  MutexLock lock(mutex_);
  if (save) {
    // A rank that was not told repeats what the spool has.
    const auto same = [&](const auto& one) {
      return one.save && one.save->part().name == save->part().name;
    };
    const bool known = std::any_of(handed_.begin(), handed_.end(), same) ||
                       std::any_of(pending_.begin(), pending_.end(), same);
    if (known || preparing_ == save->part().name) return;
    if (!save->left()) options_.spooler->Add(save);
  }
  handed_.push_back(std::move(part));
  asked_ = true;
  moved_.NotifyAll();
}

void WorldParts::Drop(const DroppedStep& step) {
  MutexLock lock(mutex_);
  dropped_.emplace_back(step, Clock::now());
  asked_ = true;
  moved_.NotifyAll();
}

bool WorldParts::Has(const AttemptName& name) const {
  const auto same = [&](const AttemptName& other) {
    return other.run == name.run && other.job == name.job && other.attempt == name.attempt;
  };
  MutexLock lock(mutex_);
  return (preparing_ && same(*preparing_)) ||
         std::any_of(handed_.begin(), handed_.end(),
                     [&](const auto& one) { return same(one.name); }) ||
         std::any_of(pending_.begin(), pending_.end(),
                     [&](const auto& one) { return same(one.name); });
}

void WorldParts::Leave(const std::string& run, const std::string& job) {
  MutexLock lock(mutex_);
  const auto found = jobs_.find({run, job});
  if (found != jobs_.end()) found->second.leaves = true;
}

std::vector<std::string> WorldParts::Waiting() const {
  MutexLock lock(mutex_);
  std::vector<std::string> lines;
  for (const Pending& one : pending_) {
    const bool known = one.has_first_rank || one.turns >= Pending::kFirstLook;
    std::string what = known ? "is being published" : "waiting for other nodes";
    if (!one.missing.empty()) what = "waiting for " + Missing(one.missing);
    lines.push_back(StrCat(one.name.run, "/", one.step, ": ", what));
  }
  if (!handing_.empty()) lines.push_back(StrCat(handing_, ": this node's part is being written"));
  for (const WorldPart& part : handed_) {
    lines.push_back(StrCat(part.name.run, "/", part.step, ": this node's part is to be written"));
  }
  return lines;
}

// ---- its thread ----------------------------------------------------------------

void WorldParts::Run() {
  for (bool ends = false; !ends;) {
    {
      MutexLock lock(mutex_);
      const auto next = Clock::now() + options_.turn;
      while (!asked_ && !stopping_ && moved_.WaitUntil(mutex_, next)) {
      }
      asked_ = false;
      ends = stopping_;  // after one more turn
    }
    const Status done = Caught([this]() -> Status {
      Turn();
      return {};
    });
    if (!done) Say(StrCat("snapshots of several nodes: ", done.error().message));
  }
}

void WorldParts::Turn() {
  JoinAll();
  DropAll();
  PrepareAll();
  LookAtAll();
  LeaveAll();
  const auto now = Clock::now();
  if (now - finished_ < kScan) return;
  finished_ = now;
  if (const Status kept = options_.commit->KeepWorlds(); !kept) Say(kept.error().message);
  const auto left = options_.commit->FinishOthers(now, kQuiet);
  if (left && *left && options_.reclaim) options_.reclaim();
}

void WorldParts::JoinAll() {
  std::vector<NodeRanks> changed;
  {
    MutexLock lock(mutex_);
    for (auto& [name, job] : jobs_) {
      // The daemons to tell of a drop are not known yet, and the job's ranks may have left.
      const bool tells =
          !(job.world && job.world->life) &&
          std::any_of(dropped_.begin(), dropped_.end(), [&name = name](auto& one) {
            return one.first.name.run == name.first && one.first.name.job == name.second;
          });
      if (std::exchange(job.changed, false) || tells) changed.push_back(job.mine);
    }
  }
  for (const NodeRanks& mine : changed) {
    auto world = Caught([&] { return options_.commit->Join(mine); });
    if (!world && !IsFinal(world.error())) {
      Say(StrCat("snapshots of ", mine.run, ": ", world.error().message));
      world = JobWorld();  // looked for again
    }
    {
      MutexLock lock(mutex_);
      jobs_[{mine.run, mine.job}].world = std::move(world);
    }
    if (options_.wake) options_.wake();
  }
}

void WorldParts::DropAll() {
  std::deque<std::pair<DroppedStep, Clock::time_point>> steps;
  {
    MutexLock lock(mutex_);
    steps.swap(dropped_);
  }
  for (auto& [step, since] : steps) {
    const auto world = WorldOf(step.name.run, step.name.job);
    const bool known = world && world->life;
    const auto told = known ? Caught([&, s = &step] {
      return options_.commit->Drop(Lived(s->name, *world->life), s->step, s->why);
    })
                            : Fail(ErrorCode::kNotFound, "");
    MutexLock lock(mutex_);
    if (told) jobs_[{step.name.run, step.name.job}].told = Clock::now();
    if (told || Late(since)) continue;
    dropped_.emplace_back(std::move(step), since);  // once it is known who waits
  }
}

bool WorldParts::IsAgain(const WorldPart& part) const {
  if (!options_.found) return false;
  return (part.save && part.save->left()) ||
         std::ranges::any_of(part.files, [](auto& one) { return one.second.again; });
}

Result<bool> WorldParts::WriteDown(WorldPart& part, const PreparedPart& prepared) {
  if (IsAgain(part)) {
    CKPT_ASSIGN_OR_RETURN(const bool found, options_.found(prepared));
    if (found) return true;
  }
  if (part.save && !std::exchange(part.begun, true)) options_.spooler->Begin(*part.save);
  MemoryRoot bytes(StrCat("snapshot ", part.name.run, "/", part.step));
  for (const auto& [rank, file] : part.files) {
    if (part.save) break;
    CKPT_RETURN_IF_ERROR(bytes.Add(prepared.PathOf(rank), file.rope, file.lease, {}));
  }
  CKPT_RETURN_IF_ERROR(
      options_.commit->Prepare(prepared, part.save ? static_cast<const Root&>(*part.save) : bytes));
  return false;
}

bool WorldParts::stopping() const {
  MutexLock lock(mutex_);
  return stopping_;
}

bool WorldParts::Prepare(WorldPart& part) {
  const std::shared_ptr<SaveBytes> save = part.save;
  if (save && stopping() && options_.spooler->Leave(*save)) return true;
  PreparedPart prepared{part.name, part.step, part.world, 0, {}};
  if (save) {
    prepared.name = save->part().name;
  } else {
    const auto world = WorldOf(part.name.run, part.name.job);
    if (!world || !world->life) {  // it left meanwhile
      Settle(part.name, part.step, Fail(ErrorCode::kNotFound, "its job is gone"), save);
      return true;
    }
    prepared.name.life = *world->life;
  }
  const AttemptName& name = prepared.name;
  for (const auto& [rank, file] : part.files) {
    prepared.ranks.push_back({rank, file.bytes, file.chunks});
  }
  const auto done = Caught([&] { return WriteDown(part, prepared); });
  if (done && *done) {
    Settle(name, part.step, {}, save);
    return true;
  }
  if (done) {
    const bool spooled = save && save->on_disk();
    // A save that is only in memory has served its purpose.
    if (spooled) options_.spooler->Stored(*save);
    if (save && !spooled) options_.spooler->Over(*save);
    MutexLock lock(mutex_);
    pending_.push_back({.name = name,
                        .step = part.step,
                        .first = part.first,
                        .has_first_rank = part.files.contains(0),
                        .save = spooled ? save : nullptr,
                        .again = IsAgain(part) ? std::optional(prepared) : std::nullopt});
    return true;
  }
  if (save) options_.spooler->Fails(*save);
  const bool ends = stopping();
  if (save && ends && options_.spooler->Leave(*save)) return true;
  const bool safe = save && save->on_disk();
  if (!IsFinal(done.error()) && (safe || !Late(part.first)) && !ends) {
    const std::string line = StrCat("snapshot ", part.name.run, "/", part.step, " stays in ",
                                    safe ? "the spool: " : "memory: ", done.error().message);
    if (std::exchange(said_, line) != line) Say(line);
    return false;
  }
  Drop({part.name, part.step, done.error().message, false});
  Settle(name, part.step, Fail(Error(done.error())), save);
  return true;
}

void WorldParts::PrepareAll() {
  for (;;) {
    WorldPart part;
    {
      MutexLock lock(mutex_);
      if (handed_.empty()) return;
      part = std::move(handed_.front());
      handed_.pop_front();
      handing_ = StrCat(part.name.run, "/", part.step);
      preparing_ = part.save ? part.save->part().name : part.name;
    }
    const bool over = Prepare(part);
    MutexLock lock(mutex_);
    handing_.clear();
    preparing_.reset();
    if (over) continue;
    handed_.push_front(std::move(part));
    return;
  }
}

bool WorldParts::DropApart(const Pending& pending, const std::map<uint64_t, uint64_t>& later) {
  bool apart = false;
  for (const auto& [attempt, step] : later) {
    if (step != pending.step || TurnOf(attempt) <= TurnOf(pending.name.attempt)) continue;
    AttemptName theirs = pending.name;
    theirs.attempt = attempt;
    const auto dropped =
        Caught([&] { return options_.commit->Drop(theirs, pending.step, std::string(kApart)); });
    if (!dropped || dropped->state != AttemptNews::State::kDropped) continue;
    apart = true;
    options_.settled(theirs, step, Fail(ErrorCode::kIo, std::string(kApart)));
  }
  return apart;
}

bool WorldParts::MayBeStep(Pending& pending, AttemptNews& news) {
  if (!pending.again) return false;
  const auto found = Caught([&] { return options_.found(*pending.again); });
  if (!found && std::exchange(said_, found.error().message) != found.error().message) Say(said_);
  if (found) pending.again.reset();
  if (!found || !*found) return !found;
  options_.commit->Withdraw(pending.name);
  news.state = AttemptNews::State::kDurable;
  return true;
}

// Nothing while it is not decided, for a daemon that need not know more of it.
Result<std::optional<AttemptNews>> WorldParts::NewsOf(Pending& pending) {
  WorldCommit& commit = *options_.commit;
  AttemptNews before;
  if (MayBeStep(pending, before)) {
    const bool is = before.state == AttemptNews::State::kDurable;
    return is ? std::optional(before) : std::nullopt;
  }
  bool publish = pending.has_first_rank;
  if (!publish) {
    const bool all = ++pending.turns >= pending.next_look || Late(pending.first);
    if (!all) return commit.Glance(pending.name);
    pending.next_look = pending.turns + std::min(pending.turns, +Pending::kMostTurns);
    CKPT_ASSIGN_OR_RETURN(publish, commit.IsOurTurn(pending.name));
    // Daemons before this one do not get on with it; the result is the same whoever publishes.
    publish = publish || Late(pending.first);
  }
  return commit.Look(pending.name, publish);
}

// True when it is settled.
bool WorldParts::LookAt(Pending& pending) {
  WorldCommit& commit = *options_.commit;
  auto glanced = Caught([&] { return NewsOf(pending); });
  if (glanced && !*glanced) return false;
  auto news =
      glanced ? Result<AttemptNews>(**std::move(glanced)) : Fail(std::move(glanced).error());
  std::string why = news ? "" : news.error().message;
  bool lost = !news && IsFinal(news.error());
  if (news && news->state == AttemptNews::State::kWaiting) {
    const bool late = !news->whole && Late(pending.first);
    if (late) why = StrCat("nothing came from ", Missing(news->missing));
    if (!news->passed.empty()) {
      why = DropApart(pending, news->later) ? std::string(kApart)
                                            : StrCat(Missing(news->passed), " went on without it");
    }
    lost = !why.empty();
    MutexLock lock(mutex_);
    pending.missing = news->missing;
    if (!lost) return false;
  }
  if (!why.empty() && !lost && !Late(pending.first)) {
    if (std::exchange(said_, why) != why) {
      Say(StrCat("snapshot ", pending.name.run, "/", pending.step, " waits: ", why));
    }
    return false;
  }
  if (!why.empty()) {
    news = Caught([&] { return commit.Drop(pending.name, pending.step, why); });
    if (!news || news->state == AttemptNews::State::kWaiting) {
      if (!Late(pending.first)) return false;
      Settle(pending.name, pending.step, Fail(ErrorCode::kIo, why), pending.save);
      return true;
    }
  }
  if (news->state == AttemptNews::State::kDropped) {
    Settle(pending.name, pending.step, Fail(ErrorCode::kIo, news->why), pending.save);
    if (options_.reclaim) options_.reclaim();  // files that were written in vain
    return true;
  }
  if (news->record && options_.stored) options_.stored(*news->record, news->published);
  Settle(pending.name, pending.step, Status(), pending.save);
  return true;
}

void WorldParts::LookAtAll() {
  size_t count = 0;
  {
    MutexLock lock(mutex_);
    count = pending_.size();
  }
  for (size_t i = 0; i < count;) {
    Pending* pending = nullptr;
    {
      MutexLock lock(mutex_);
      pending = &pending_[i];  // only this thread moves them
    }
    if (!LookAt(*pending)) {
      ++i;
      continue;
    }
    MutexLock lock(mutex_);
    pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(i));
    --count;
  }
}

void WorldParts::LeaveAll() {
  std::vector<JobName> over;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, job] : jobs_) {
      const auto of = [&name = name](const AttemptName& attempt) {
        return attempt.run == name.first && attempt.job == name.second;
      };
      const bool busy = std::any_of(pending_.begin(), pending_.end(),
                                    [&](const Pending& one) { return of(one.name); }) ||
                        std::any_of(handed_.begin(), handed_.end(),
                                    [&](const WorldPart& one) { return of(one.name); }) ||
                        std::any_of(dropped_.begin(), dropped_.end(),
                                    [&](const auto& one) { return of(one.first.name); });
      if (job.leaves && !busy && (!job.told || Late(*job.told))) over.push_back(name);
    }
    for (const JobName& name : over) jobs_.erase(name);
  }
  for (const auto& [run, job] : over) options_.commit->Leave(run, job);
}

void WorldParts::Settle(const AttemptName& name, uint64_t step, const Status& done,
                        const std::shared_ptr<SaveBytes>& save) {
  if (save) options_.spooler->Over(*save);
  options_.settled(name, step, done);
}

}  // namespace ckptfs
