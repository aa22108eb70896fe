// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/taken_runs.h"

#include <algorithm>
#include <map>

namespace ckptfs {

TakenRuns::TakenRuns(const CaptureFile& file) {
  std::map<int, uint64_t> taken;  // by device
  for (const CopyRun& run : file.Runs(0, file.bytes(), false)) {
    if (run.device == kHost || run.bytes == 0 || run.bytes > kLargestTaken) continue;
    if (taken[run.device] + run.bytes > kMostTaken) continue;
    taken[run.device] += run.bytes;
    pieces_.push_back({run.from, run.bytes, run.device});
    runs_.push_back(run);
  }
}

void TakenRuns::Place(std::span<const std::byte* const> taken) {
  if (taken.size() != runs_.size()) {
    pieces_.clear();
    runs_.clear();
    return;
  }
  std::vector<CopyRun> placed;
  for (size_t i = 0; i < taken.size(); ++i) {
    CopyRun run = runs_[i];
    run.from = taken[i];
    CopyRun* const last = placed.empty() ? nullptr : &placed.back();
    if (last != nullptr && last->device == run.device && last->at + last->bytes == run.at &&
        last->from + last->bytes == run.from) {
      last->bytes += run.bytes;
    } else {
      placed.push_back(run);
    }
  }
  runs_ = std::move(placed);
}

const CopyRun* TakenRuns::Find(uint64_t at) const {
  const auto run = std::ranges::upper_bound(runs_, at, {},
                                            [](const CopyRun& one) { return one.at + one.bytes; });
  return run == runs_.end() ? nullptr : &*run;
}

bool TakenRuns::Has(uint64_t at) const {
  const CopyRun* const run = Find(at);
  return run != nullptr && run->at <= at;
}

std::vector<CopyRun> TakenRuns::Runs(uint64_t begin, uint64_t end) const {
  std::vector<CopyRun> found;
  const CopyRun* run = Find(begin);
  for (; run != nullptr && run != runs_.data() + runs_.size() && run->at < end; ++run) {
    const uint64_t from = std::max(begin, run->at), to = std::min(end, run->at + run->bytes);
    found.push_back({run->from + (from - run->at), from, to - from, run->device});
  }
  return found;
}

}  // namespace ckptfs
