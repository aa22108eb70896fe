// SPDX-License-Identifier: Apache-2.0
//
// Steps of which other daemons have ranks.

#include <algorithm>
#include <utility>

#include "snapshot/receive/receiver_state.h"

namespace ckptfs {

void Receiver::State::LeaveLives() {
  for (const auto& name : steps.TakeRenewed()) {
    if (jobs.erase(name) != 0) options.landing->Leave(name.first, name.second);
    const auto here = of_job.find(name);
    if (here == of_job.end() || !options.landing->has_worlds()) continue;
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
  const auto world = options.landing->WorldOf(name.first, name.second);
  if (world && world->life) steps.Meet({name.first, name.second});
}

void Receiver::State::SeeWorlds() {
  for (const auto& [name, job] : jobs) {
    const bool waits = steps.HasOpen(name.first, name.second);
    const bool all_here = job.ranks.size() >= job.world;
    if (waits && !all_here) options.landing->See(job);
    const auto world = options.landing->WorldOf(name.first, name.second);
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
    options.landing->Leave(run, job);
    at = jobs.erase(at);
  }
}

void Receiver::State::Spread(const std::set<AttemptName>& moved) {
  for (const AttemptName& name : moved) {
    const auto job = jobs.find({name.run, name.job});
    if (job == jobs.end() || job->second.ranks.size() >= job->second.world)
      continue;  // all are here
    if (!steps.Find(name)) continue;
    options.landing->See(job->second);
    const auto world = options.landing->WorldOf(name.run, name.job);
    if (world && world->life) steps.Meet(name);
    SpreadOne(name, world);
  }
}

void Receiver::State::SpreadOne(const AttemptName& name, const Result<JobWorld>& world) {
  const auto waiting = steps.Find(name);
  if (!waiting || !waiting->untaken) return;
  if (options.landing->MayBeOver(name)) return;
  if (!world) return steps.Drop(name, waiting->step, world.error().message);
  if (!world->life) return;
  uint64_t elsewhere = 0;
  for (const auto& [rank, host] : world->elsewhere) {
    elsewhere += rank < waiting->world && !waiting->here->Contains(rank) ? 1 : 0;
  }
  if (waiting->here->size() + elsewhere < waiting->world || steps.DropUnmet(name)) return;
  const auto [step, size] = std::pair(waiting->step, waiting->world);
  IncomingSteps::Part part = steps.Take(name);
  AttemptName lived = name;
  lived.life = *world->life;
  options.landing->Take({std::move(lived), step, size, std::move(part.files), part.first});
}

std::set<uint32_t> Receiver::State::Elsewhere(const AttemptName& name) const {
  std::set<uint32_t> found;
  const Landing& landing = *options.landing;
  const auto world = landing.has_worlds() ? landing.WorldOf(name.run, name.job) : JobWorld();
  if (!world) return found;
  for (const auto& [rank, host] : world->elsewhere) found.insert(rank);
  return found;
}

// Writes it under the name that it will have: the job's ranks are here, or all are known.
std::shared_ptr<BlobStream> Receiver::State::Stream(PreparedPart part,
                                                    std::weak_ptr<const void> owner) const {
  Landing& landing = *options.landing;
  const auto job = jobs.find({part.name.run, part.name.job});
  const bool here = job != jobs.end() && job->second.ranks.size() >= part.world;
  if (landing.has_worlds() && !here) {
    const auto world = landing.WorldOf(part.name.run, part.name.job);
    if (world && world->life) part.name.life = *world->life;
  }
  return landing.Stream(std::move(part), std::move(owner));
}

void Receiver::State::DropElsewhere(const DroppedStep& step) {
  const auto job = jobs.find({step.name.run, step.name.job});
  if (job == jobs.end() || job->second.ranks.size() >= job->second.world) return;
  options.landing->See(job->second);
  options.landing->Drop(step);
}

}  // namespace ckptfs
