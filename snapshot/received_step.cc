// SPDX-License-Identifier: Apache-2.0

#include "snapshot/received_step.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kRemembered = 4096;
constexpr size_t kRememberedRanks = 1 << 16;
constexpr size_t kRememberedAttempts = 16;

}  // namespace

std::optional<ReceivedStep> IncomingSteps::Add(const AttemptName& name, uint64_t step,
                                               uint32_t rank, uint32_t world, ReceivedFile file,
                                               Time now) {
  if (const auto gone = gone_.find(name); gone != gone_.end()) {
    dropped_.push_back({name, step, gone->second, true});
    return std::nullopt;
  }
  const auto [at, first] = open_.try_emplace(name, Open{step, world, now, {}, {}});
  Open& open = at->second;
  if (open.step != step || open.world != world) {
    Drop(name, step,
         StrCat("its ranks disagree: step ", open.step, " of ", open.world, " ranks, step ", step,
                " of ", world));
    return std::nullopt;
  }
  if (open.taken.contains(rank) || !open.files.emplace(rank, std::move(file)).second) {
    Drop(name, step, StrCat("rank ", rank, " handed its part over twice"));
    return std::nullopt;
  }
  if (open.files.size() < world) {
    DropPassed(name, step);
    return std::nullopt;
  }
  ReceivedStep whole{name, step, {}, LifeOf(name)};
  for (auto& [number, part] : open.files) whole.files.push_back(std::move(part));
  Forget(name);
  return whole;
}

void IncomingSteps::Forget(const AttemptName& name) {
  open_.erase(name);
  lives_.erase(name);
}

Digest IncomingSteps::LifeOf(const AttemptName& name) {
  const auto [at, fresh] = lives_.try_emplace(name);
  if (fresh) at->second = RandomDigest();
  return at->second;
}

void IncomingSteps::Drop(const AttemptName& name, uint64_t step, const std::string& why) {
  if (!gone_.emplace(name, why).second) return;
  gone_in_order_.push_back(name);
  if (gone_in_order_.size() > kRemembered) {
    gone_.erase(gone_in_order_.front());
    gone_in_order_.pop_front();
  }
  Forget(name);
  dropped_.push_back({name, step, why, false});
}

bool IncomingSteps::Begin(const AttemptName& name, uint32_t rank, bool again) {
  if (begun_.size() > kRememberedRanks) begun_.clear();
  Begun& begun = begun_[{name.run, name.job, rank}];
  if (!begun.attempts.empty() && name.attempt <= *begun.attempts.rbegin()) return false;
  begun.attempts.insert(name.attempt);
  if (begun.attempts.size() > kRememberedAttempts) begun.attempts.erase(begun.attempts.begin());
  if (!begun.first && !again) begun.first = name.attempt;
  std::vector<std::pair<AttemptName, uint64_t>> before;
  for (const auto& [other, open] : open_) {
    if (other.run == name.run && other.job == name.job && other.attempt < name.attempt) {
      before.emplace_back(other, open.step);
    }
  }
  for (const auto& [other, step] : before) DropPassed(other, step);
  return true;
}

std::set<uint32_t> IncomingSteps::PassedBy(const AttemptName& name) const {
  std::set<uint32_t> ranks;
  for (auto at = begun_.lower_bound({name.run, name.job, 0}); at != begun_.end(); ++at) {
    const auto& [run, job, rank] = at->first;
    if (run != name.run || job != name.job) break;
    const auto& [first, attempts] = at->second;
    if (!first || name.attempt < std::max(*first, *attempts.begin())) continue;
    if (name.attempt > *attempts.rbegin() || attempts.contains(name.attempt)) continue;
    ranks.insert(rank);
  }
  return ranks;
}

void IncomingSteps::DropPassed(const AttemptName& name, uint64_t step) {
  const std::set<uint32_t> ranks = PassedBy(name);
  if (ranks.empty()) return;
  Drop(name, step,
       StrCat(ranks.size() == 1 ? "rank " : "ranks ", RanksText(ranks), " went on without it"));
}

std::vector<IncomingSteps::Waiting> IncomingSteps::waiting() const {
  std::vector<Waiting> found;
  for (const auto& [name, open] : open_) {
    Waiting one{name, open.step, open.world, {}, open.taken};
    for (const auto& [rank, file] : open.files) one.ended.insert(rank);
    found.push_back(std::move(one));
  }
  return found;
}

IncomingSteps::Part IncomingSteps::Take(const AttemptName& name) {
  Open& open = open_.at(name);
  for (const auto& [rank, file] : open.files) open.taken.insert(rank);
  return {open.first, std::exchange(open.files, {})};
}

void IncomingSteps::DropOlder(Time limit, const Elsewhere& elsewhere) {
  std::vector<DroppedStep> found;
  for (const auto& [name, open] : open_) {
    if (open.first >= limit || open.files.empty()) continue;
    std::set<uint32_t> missing;
    for (uint32_t rank = 0; rank < open.world; ++rank) {
      if (!open.files.contains(rank) && !open.taken.contains(rank)) missing.insert(rank);
    }
    if (elsewhere) {
      for (const uint32_t rank : elsewhere(name)) missing.erase(rank);
    }
    found.push_back({name, open.step, StrCat("nothing came of rank ", RanksText(missing)), false});
  }
  for (const DroppedStep& one : found) Drop(one.name, one.step, one.why);
}

std::vector<DroppedStep> IncomingSteps::TakeDropped() { return std::exchange(dropped_, {}); }

}  // namespace ckptfs
