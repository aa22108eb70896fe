// SPDX-License-Identifier: Apache-2.0

#include "snapshot/landing/rank_ranges.h"

#include <algorithm>
#include <iterator>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kNamedRanges = 8;

}  // namespace

bool RankRanges::Contains(uint32_t rank) const {
  const auto after = ranges_.upper_bound(rank);
  return after != ranges_.begin() && std::prev(after)->second >= rank;
}

bool RankRanges::Insert(uint32_t rank) {
  if (Contains(rank)) return false;
  ++size_;
  const auto after = ranges_.upper_bound(rank);
  const bool meets_after = after != ranges_.end() && after->first == rank + 1;
  const bool meets_before = after != ranges_.begin() && std::prev(after)->second + 1 == rank;
  const uint32_t last = meets_after ? after->second : rank;
  if (meets_before) {
    std::prev(after)->second = last;
  } else {
    ranges_.emplace(rank, last);
  }
  if (meets_after) ranges_.erase(after);
  return true;
}

std::string RankRanges::MissingText(uint32_t world, const std::set<uint32_t>& elsewhere) const {
  RankRanges all = *this;
  for (const uint32_t rank : elsewhere) all.Insert(rank);
  std::string text;
  size_t named_ranges = 0;
  uint64_t named = 0;
  uint64_t next = 0;  // the first rank that was not looked at
  const auto name = [&](uint64_t end) {
    if (next >= end || named_ranges++ >= kNamedRanges) return;
    text += StrCat(named == 0 ? "" : ", ", next);
    if (next + 1 < end) text += StrCat("-", end - 1);
    named += end - next;
  };
  for (const auto& [first, last] : all.ranges_) {
    name(std::min(first, world));
    next = uint64_t{last} + 1;
  }
  name(world);
  const uint64_t missing = all.Missing(world);
  if (named < missing) text += StrCat(" and ", missing - named, " more");
  return text;
}

}  // namespace ckptfs
