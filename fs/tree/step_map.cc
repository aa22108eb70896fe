// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/step_map.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/checked_math.h"
#include "core/store/lives.h"

namespace ckptfs {
namespace {

using Steps = std::vector<StepMap::Change>;

// Sorted steps with sorted changes.
Steps Changed(const Steps& steps, std::span<StepMap::Change> changes) {
  Steps out;
  out.reserve(steps.size() + changes.size());
  auto kept = steps.begin();
  for (StepMap::Change& change : changes) {
    while (kept != steps.end() && kept->id < change.id) out.push_back(*kept++);
    if (kept != steps.end() && kept->id == change.id) ++kept;
    if (change.step) out.push_back(std::move(change));
  }
  out.insert(out.end(), kept, steps.end());
  return out;
}

}  // namespace

StepMap StepMap::With(std::vector<Change> changes) const {
  StepMap out;
  if (chunks_.empty()) out.Append(Changed({}, changes));
  auto change = changes.begin();
  for (size_t i = 0; i < chunks_.size(); ++i) {
    // A chunk has what comes before the next one; the last one all that is left.
    auto end = changes.end();
    if (i + 1 < chunks_.size()) {
      end = std::lower_bound(change, end, chunks_[i + 1]->steps.front().id,
                             [](const Change& a, const std::string& id) { return a.id < id; });
    }
    if (change == end) {
      out.chunks_.push_back(chunks_[i]);
    } else {
      out.Append(Changed(chunks_[i]->steps, {change, end}));
    }
    change = end;
  }
  return out;
}

// In pieces of one size, so that what grows at one place is not cut for each step.
void StepMap::Append(std::vector<Change> steps) {
  const size_t pieces = CeilDiv(steps.size(), kSteps);
  auto at = steps.begin();
  for (size_t piece = 1; piece <= pieces; ++piece) {
    const auto end = steps.begin() + static_cast<ptrdiff_t>(steps.size() * piece / pieces);
    auto chunk = std::make_shared<Chunk>();
    chunk->steps.assign(std::make_move_iterator(at), std::make_move_iterator(end));
    for (const Change& kept : chunk->steps) {
      const StepRecord& record = kept.step->record();
      if (!chunk->latest || IsOlder(chunk->latest->record(), record)) chunk->latest = kept.step;
      chunk->mtime_ns = std::max(chunk->mtime_ns, record.mtime_ns);
    }
    chunks_.push_back(std::move(chunk));
    at = end;
  }
}

std::shared_ptr<StepEntry> StepMap::Find(std::string_view id) const {
  const auto after = std::upper_bound(
      chunks_.begin(), chunks_.end(), id,
      [](std::string_view wanted, const auto& chunk) { return wanted < chunk->steps.front().id; });
  if (after == chunks_.begin()) return nullptr;
  const std::vector<Change>& steps = (*std::prev(after))->steps;
  const auto found = std::lower_bound(
      steps.begin(), steps.end(), id,
      [](const Change& kept, std::string_view wanted) { return kept.id < wanted; });
  return found != steps.end() && found->id == id ? found->step : nullptr;
}

size_t StepMap::size() const {
  size_t steps = 0;
  for (const auto& chunk : chunks_) steps += chunk->steps.size();
  return steps;
}

std::shared_ptr<StepEntry> StepMap::latest() const {
  std::shared_ptr<StepEntry> latest;
  for (const auto& chunk : chunks_) {
    if (!latest || IsOlder(latest->record(), chunk->latest->record())) latest = chunk->latest;
  }
  return latest;
}

int64_t StepMap::mtime_ns() const {
  int64_t newest = 0;
  for (const auto& chunk : chunks_) newest = std::max(newest, chunk->mtime_ns);
  return newest;
}

}  // namespace ckptfs
