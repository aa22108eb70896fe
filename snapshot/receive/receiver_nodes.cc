// SPDX-License-Identifier: Apache-2.0
//
// Steps of which other daemons have ranks.

#include <algorithm>
#include <utility>

#include "core/base/single_flight.h"
#include "snapshot/receive/receiver_state.h"

namespace ckptfs {

void Receiver::State::StartParts() {
  if (options.commit == nullptr) return;
  WorldPartsOptions of;
  of.commit = options.commit;
  of.patience = options.patience;
  of.turn = options.turn;
  of.stored = options.shown;
  of.spooler = options.spooler;
  of.found = [this](const PreparedPart& part) -> Result<bool> {
    const PartAgain left{part.name, part.step, part.ranks.front().rank, part.world,
                         {},        true,      part.Directory()};
    return options.stored ? options.stored(left) : false;
  };
  of.reclaim = options.reclaim;
  of.log = options.log;
  of.wake = [this] {
    worlds_moved = true;
    budget->Wake();
  };
  of.settled = [this](const AttemptName& name, uint64_t step, const Status& done) {
    const std::string title = TitleOf(name, step);
    const std::string drop =
        done ? "" : StrCat("snapshot ", title, " dropped: ", done.error().message);
    if (!done) Say(drop);
    {
      MutexLock guard(mutex);
      Count(title, drop);
      kept.push_back({{name.run, name.job, name.attempt},
                      step,
                      done,
                      PreparedPart{name, step, 0, 0, {}}.Directory()});
    }
    budget->Wake();
  };
  parts = std::make_unique<WorldParts>(std::move(of));
}

void Receiver::State::LeaveLives() {
  for (const auto& name : steps.TakeRenewed()) {
    if (jobs.erase(name) != 0) parts->Leave(name.first, name.second);
    const auto here = of_job.find(name);
    if (here == of_job.end()) continue;
    for (const RankSession* session : here->second) SeeJob(*session);
  }
}

void Receiver::State::SeeJob(const RankSession& session) {
  if (session.world() == 1) return;
  const JobName name(session.run(), session.job());
  NodeRanks& job =
      jobs.try_emplace(name, NodeRanks{name.first, name.second, session.world(), "", {}})
          .first->second;
  job.ranks[session.rank()] = session.life();
  const auto world = parts->WorldOf(name.first, name.second);
  if (world && world->life) steps.Meet({name.first, name.second});
}

void Receiver::State::SeeWorlds() {
  for (const auto& [name, job] : jobs) {
    const bool waits = steps.HasOpen(name.first, name.second);
    const bool all_here = job.ranks.size() >= job.world;
    if (waits && !all_here) parts->See(job);
    const auto world = parts->WorldOf(name.first, name.second);
    if (world && world->life) steps.Meet({name.first, name.second});
    if (!waits || all_here || (world && !world->life)) continue;
    for (const AttemptName& attempt : steps.OpenOf(name.first, name.second))
      SpreadOne(attempt, world);
  }
}

void Receiver::State::ForgetJobs() {
  for (auto at = jobs.begin(); at != jobs.end();) {
    const auto& [run, job] = at->first;
    if (of_job.contains(at->first) || steps.HasOpen(run, job)) {
      ++at;
      continue;
    }
    parts->Leave(run, job);
    at = jobs.erase(at);
  }
}

void Receiver::State::Spread(const std::set<AttemptName>& moved) {
  for (const AttemptName& name : moved) {
    const auto job = jobs.find({name.run, name.job});
    if (job == jobs.end() || job->second.ranks.size() >= job->second.world)
      continue;  // all are here
    if (!steps.Find(name)) continue;
    parts->See(job->second);
    const auto world = parts->WorldOf(name.run, name.job);
    if (world && world->life) steps.Meet(name);
    SpreadOne(name, world);
  }
}

void Receiver::State::SpreadOne(const AttemptName& name, const Result<JobWorld>& world) {
  const auto waiting = steps.Find(name);
  if (!waiting || !waiting->untaken) return;
  {
    MutexLock guard(mutex);  // it may be stored already
    if (looked_for.contains(name)) return;
    if (std::ranges::any_of(kept, [&](const Kept& one) { return one.name == name; })) return;
  }
  if (!world) return steps.Drop(name, waiting->step, world.error().message);
  if (!world->life) return;
  uint64_t elsewhere = 0;
  for (const auto& [rank, host] : world->elsewhere) {
    elsewhere += rank < waiting->world && !waiting->here->Contains(rank) ? 1 : 0;
  }
  if (waiting->here->size() + elsewhere < waiting->world || steps.DropUnmet(name)) return;
  const auto [step, size] = std::pair(waiting->step, waiting->world);
  IncomingSteps::Part part = steps.Take(name);
  ProtectPart(options.protect, name, *world->life, step, size, part.files);
  CountUnproved(std::ranges::any_of(part.files, [](auto& one) { return one.second.unproved > 0; }));
  WorldPart mine{name, step, size, std::move(part.files), part.first};
  if (options.spooler != nullptr) {
    AttemptName lived = name;
    lived.life = *world->life;
    mine.save = std::make_shared<SaveBytes>(std::move(lived), mine.step, mine.world);
    for (auto& [rank, file] : mine.files) CKPT_CHECK(mine.save->Add(rank, file));
  }
  parts->Hand(std::move(mine));
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

}  // namespace ckptfs
