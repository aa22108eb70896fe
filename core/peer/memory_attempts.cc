// SPDX-License-Identifier: Apache-2.0

#include "core/peer/memory_attempts.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

void AddPart(MemoryAttempt& attempt, const ShelvedPart& part, const Digest& node) {
  if (part.world != attempt.world) {
    attempt.wrong = StrCat("nodes say ", attempt.world, " and ", part.world, " ranks");
    return;
  }
  const auto [at, added] = attempt.ranks.try_emplace(part.rank);
  HeldRank& rank = at->second;
  if (added) {
    rank.bytes = part.bytes;
    rank.chunks = part.chunks;
  }
  const bool first_unit = part.shape.cuts() && rank.units.empty();
  if (first_unit) {
    rank.shape = part.shape;
    rank.parity_chunks = part.parity_chunks;
  }
  const bool one_stripe =
      !part.shape.cuts() || (rank.shape == part.shape && rank.parity_chunks == part.parity_chunks);
  if (rank.bytes != part.bytes || rank.chunks != part.chunks || !one_stripe) {
    attempt.wrong = StrCat("nodes hold different files of rank ", part.rank);
    return;
  }
  if (part.state == ShelvedState::kProtected) rank.state = part.state;
  (part.shape.cuts() ? rank.units[part.unit] : rank.nodes).push_back(node);
  if (part.rank == 0) attempt.mtime_ns = part.mtime_ns;
}

}  // namespace

bool HeldRank::there() const {
  if (!nodes.empty()) return true;
  uint32_t known = 0;
  for (uint32_t unit = 0; unit < shape.units() && !units.empty(); ++unit)
    known += units.contains(unit) || shape.UnitBytes(unit, bytes) == 0 ? 1 : 0;
  return known >= shape.data;
}

bool MemoryAttempt::whole() const {
  return wrong.empty() && ranks.size() == world &&
         std::all_of(ranks.begin(), ranks.end(),
                     [](const auto& rank) { return rank.second.there(); });
}

std::string MemoryAttempt::Directory() const {
  return PreparedPart{name, step, world, mtime_ns, {}}.Directory();
}

bool MemoryAttempt::is_protected() const {
  return whole() && std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) {
           return rank.second.state == ShelvedState::kProtected;
         });
}

std::string MemoryAttempt::Hindrance() const {
  if (!wrong.empty()) return wrong;
  std::set<uint32_t> missing, unprotected;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const auto found = ranks.find(rank);
    if (found == ranks.end() || !found->second.there()) {
      missing.insert(rank);
    } else if (found->second.state != ShelvedState::kProtected) {
      unprotected.insert(rank);
    }
  }
  const auto named = [](const std::set<uint32_t>& which) {
    return StrCat(which.size() == 1 ? "rank " : "ranks ", RanksText(which));
  };
  if (!missing.empty()) return StrCat("no nodes that answer hold ", named(missing));
  return unprotected.empty() ? "" : StrCat("not protected yet: ", named(unprotected));
}

std::vector<MemoryAttempt> AttemptsOn(const PeerShelves& shelves) {
  std::map<std::pair<std::string, std::string>, MemoryAttempt> found;
  for (const auto& [node, parts] : shelves) {
    for (const ShelvedPart& part : parts) {
      const auto [at, added] = found.try_emplace({part.name.run, part.Directory()});
      if (added) at->second = {part.name, part.step, part.world, 0, {}, ""};
      AddPart(at->second, part, node);
    }
  }
  std::vector<MemoryAttempt> attempts;
  for (auto& [key, attempt] : found) attempts.push_back(std::move(attempt));
  return attempts;
}

bool IsEarlier(const MemoryAttempt& a, const MemoryAttempt& b) {
  const bool one_life = a.name.job == b.name.job && a.name.life == b.name.life;
  if (one_life) return a.name.attempt < b.name.attempt;
  const bool has_time = a.mtime_ns != 0;  // rank 0's, which may come yet
  return has_time && a.mtime_ns < b.mtime_ns;
}

const MemoryAttempt* NewestProtected(const std::vector<MemoryAttempt>& attempts,
                                     std::string_view run) {
  const MemoryAttempt* newest = nullptr;
  for (const MemoryAttempt& attempt : attempts) {
    if (attempt.name.run != run || !attempt.is_protected()) continue;
    if (newest == nullptr || IsEarlier(*newest, attempt)) newest = &attempt;
  }
  return newest;
}

}  // namespace ckptfs
