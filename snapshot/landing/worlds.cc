// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/worlds.h"

#include <algorithm>
#include <vector>

#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "snapshot/landing/landing_state.h"

namespace ckptfs {

bool Worlds::See(const NodeRanks& mine) {
  MutexLock lock(mutex_);
  Job& job = jobs_[{mine.run, mine.job}];
  if (job.mine == mine && job.world && job.world->life) return false;
  const bool added = job.mine != mine;
  job.mine = mine;
  job.changed = true;
  job.leaves = false;
  if (added) job.world = JobWorld();  // it may be that of other lives
  return added;
}

Result<JobWorld> Worlds::WorldOf(const std::string& run, const std::string& job) const {
  MutexLock lock(mutex_);
  const auto found = jobs_.find({run, job});
  return found == jobs_.end() ? JobWorld() : found->second.world;
}

void Worlds::Drop(const DroppedStep& step) {
  MutexLock lock(mutex_);
  dropped_.emplace_back(step, Clock::now());
}

void Worlds::Leave(const std::string& run, const std::string& job) {
  MutexLock lock(mutex_);
  const auto found = jobs_.find({run, job});
  if (found != jobs_.end()) found->second.leaves = true;
}

bool Worlds::JoinAll() {
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
    auto world = Caught([&] { return commit_.Join(mine); });
    if (!world && !IsFinal(LandingAction::kPrepare, world.error().code)) {
      if (log_) log_(StrCat("snapshots of ", mine.run, ": ", world.error().message));
      world = JobWorld();  // looked for again
    }
    MutexLock lock(mutex_);
    jobs_[{mine.run, mine.job}].world = std::move(world);
  }
  return !changed.empty();
}

void Worlds::DropAll() {
  std::deque<std::pair<DroppedStep, Clock::time_point>> steps;
  {
    MutexLock lock(mutex_);
    steps.swap(dropped_);
  }
  for (auto& [step, since] : steps) {
    const auto world = WorldOf(step.name.run, step.name.job);
    const bool known = world && world->life;
    const auto told = known ? Caught([&, s = &step] {
      AttemptName name = s->name;
      name.life = *world->life;
      return commit_.Drop(name, s->step, s->why);
    })
                            : Fail(ErrorCode::kNotFound, "");
    MutexLock lock(mutex_);
    if (told) jobs_[{step.name.run, step.name.job}].told = Clock::now();
    if (told || Late(since)) continue;
    dropped_.emplace_back(std::move(step), since);  // once it is known who waits
  }
}

void Worlds::LeaveAll(const std::set<JobName>& busy) {
  std::vector<JobName> over;
  {
    MutexLock lock(mutex_);
    for (const auto& [name, job] : jobs_) {
      const bool drops = std::ranges::any_of(dropped_, [&name = name](const auto& one) {
        return one.first.name.run == name.first && one.first.name.job == name.second;
      });
      const bool waits = drops || busy.contains(name);
      if (job.leaves && !waits && (!job.told || Late(*job.told))) over.push_back(name);
    }
    for (const JobName& name : over) jobs_.erase(name);
  }
  for (const auto& [run, job] : over) commit_.Leave(run, job);
}

}  // namespace ckptfs
