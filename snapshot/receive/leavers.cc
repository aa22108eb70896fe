// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/leavers.h"

#include <algorithm>
#include <utility>

namespace ckptfs {

bool Leavers::Leaver::HasEnded() const {
  pollfd event{process.get(), POLLIN, 0};
  return poll(&event, 1, 0) == 1;
}

void Leavers::Add(RankOfJob who, int number, Descriptor process, JobLives::Time now) {
  auto at = std::ranges::find_if(leavers_, [&](const Leaver& leaver) {
    return leaver.number == number && !leaver.HasEnded();
  });
  if (at == leavers_.end()) {
    leavers_.push_back({number, std::move(process), {}, now});
    at = std::prev(leavers_.end());
  }
  at->since = now;
  at->ranks.push_back(std::move(who));
  if (at->ranks.size() > kMostRanks) at->ranks.pop_front();
}

std::vector<RankOfJob> Leavers::TakeEnded(JobLives::Time now) {
  std::vector<RankOfJob> ended;
  std::erase_if(leavers_, [&](Leaver& leaver) {
    const bool over = leaver.HasEnded();
    if (over) std::ranges::move(leaver.ranks, std::back_inserter(ended));
    return over || now - leaver.since > kLeaving;
  });
  return ended;
}

void Leavers::AddTo(std::vector<pollfd>& events) const {
  for (const Leaver& leaver : leavers_) events.push_back({leaver.process.get(), POLLIN, 0});
}

}  // namespace ckptfs
