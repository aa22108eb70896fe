// SPDX-License-Identifier: Apache-2.0

#include "core/peer/memory_attempts.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using Units = std::map<uint32_t, std::vector<Digest>>;

// True if a file of so many bytes can be had from these units of it.
bool Suffice(const Units& units, const StripeShape& shape, uint64_t bytes) {
  uint32_t known = 0;
  for (uint32_t unit = 0; unit < shape.units() && !units.empty(); ++unit)
    known += units.contains(unit) || shape.UnitBytes(unit, bytes) == 0 ? 1 : 0;
  return known >= shape.data;
}

// Units of one way to cut a file.
struct Stripe {
  StripeShape shape;
  Digest parity_chunks;
  ShelvedState state = ShelvedState::kHeld;
  Units units;
};
// By rank.  A file has several where its owner cut it anew, since nodes came or went, and where
// not all who held units of the earlier stripe could be told.
using Stripes = std::map<uint32_t, std::vector<Stripe>>;

void AddUnit(std::vector<Stripe>& stripes, const ShelvedPart& part, const Digest& node) {
  auto at = std::ranges::find_if(stripes, [&](const Stripe& one) {
    return one.shape == part.shape && one.parity_chunks == part.parity_chunks;
  });
  if (at == stripes.end()) at = stripes.insert(at, {part.shape, part.parity_chunks, {}, {}});
  at->units[part.unit].push_back(node);
  at->state = std::max(at->state, part.state);
}

void AddPart(MemoryAttempt& attempt, Stripes& stripes, const ShelvedPart& part,
             const Digest& node) {
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
  if (rank.bytes != part.bytes || rank.chunks != part.chunks) {
    attempt.wrong = StrCat("nodes hold different files of rank ", part.rank);
    return;
  }
  if (part.rank == 0) attempt.mtime_ns = part.mtime_ns;
  if (part.shape.cuts()) return AddUnit(stripes[part.rank], part, node);
  rank.nodes.push_back(node);
  rank.state = std::max(rank.state, part.state);
}

// Takes the stripe of which the file can be had, the protected one of several such; else the
// fullest.
void TakeStripe(HeldRank& rank, std::vector<Stripe> stripes) {
  const auto worth = [&](const Stripe& stripe) {
    const bool there = Suffice(stripe.units, stripe.shape, rank.bytes);
    return std::tuple(there, stripe.state, stripe.units.size());
  };
  const auto best = std::ranges::max_element(stripes, {}, worth);
  rank.shape = best->shape;
  rank.parity_chunks = best->parity_chunks;
  rank.units = std::move(best->units);
  rank.state = std::max(rank.state, best->state);
}

}  // namespace

bool HeldRank::there() const { return !nodes.empty() || Suffice(units, shape, bytes); }

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
  std::map<std::pair<std::string, std::string>, std::pair<MemoryAttempt, Stripes>> found;
  for (const auto& [node, parts] : shelves) {
    for (const ShelvedPart& part : parts) {
      const auto [at, added] = found.try_emplace({part.name.run, part.Directory()});
      auto& [attempt, stripes] = at->second;
      if (added) attempt = {part.name, part.step, part.world, 0, {}, ""};
      AddPart(attempt, stripes, part, node);
    }
  }
  std::vector<MemoryAttempt> attempts;
  for (auto& [key, one] : found) {
    auto& [attempt, stripes] = one;
    for (auto& [rank, of] : stripes) TakeStripe(attempt.ranks[rank], std::move(of));
    attempts.push_back(std::move(attempt));
  }
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
