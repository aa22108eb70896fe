// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/leavers.h"

#include <utility>

namespace ckptfs {

void Leavers::Add(RankOfJob who, Descriptor process, JobLives::Time now) {
  leavers_.push_back({std::move(who), std::move(process), now});
}

std::vector<RankOfJob> Leavers::TakeEnded(JobLives::Time now) {
  std::vector<RankOfJob> ended;
  std::erase_if(leavers_, [&](Leaver& leaver) {
    pollfd event{leaver.process.get(), POLLIN, 0};
    const bool over = poll(&event, 1, 0) == 1;
    if (over) ended.push_back(std::move(leaver.who));
    return over || now - leaver.since > kLeaving;
  });
  return ended;
}

void Leavers::AddTo(std::vector<pollfd>& events) const {
  for (const Leaver& leaver : leavers_) events.push_back({leaver.process.get(), POLLIN, 0});
}

}  // namespace ckptfs
