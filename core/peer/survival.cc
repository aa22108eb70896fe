// SPDX-License-Identifier: Apache-2.0

#include "core/peer/survival.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using Counts = std::vector<long double>;

constexpr double kDaysAYear = 365;
constexpr double kMinutesADay = 24 * 60;
constexpr unsigned kMostDomains = 2;
constexpr size_t kMostSeats = size_t{1} << 22;  // of all pairs of domains

long double Choose(size_t n, size_t k) {
  if (k > n) return 0;
  long double ways = 1;
  for (size_t i = 1; i <= k; ++i)
    ways = ways * static_cast<long double>(n - k + i) / static_cast<long double>(i);
  return ways;
}

// Appends one more member to all subsets that are counted: alive, and dead.
struct Runs {
  // [t][j]: subsets of j members of which the last t are dead and no `limit` in a row are.
  std::vector<Counts> by_tail;

  void Add(bool dead_already) {
    std::vector<Counts> next(by_tail.size(), Counts(by_tail[0].size()));
    for (size_t t = 0; t < by_tail.size(); ++t) {
      for (size_t j = 0; j < by_tail[t].size(); ++j) {
        const long double ways = by_tail[t][j];
        if (ways == 0) continue;
        if (!dead_already) next[0][j] += ways;
        if (t + 1 < by_tail.size() && j + 1 < next[0].size()) next[t + 1][j + 1] += ways;
      }
    }
    by_tail = std::move(next);
  }
};

// Subsets of a ring in which no `limit` neighbours are dead.  Each is counted where its first
// living member stands: `lead` dead ones come before it, and join those at the end.
Counts RingsWithoutARun(const std::vector<bool>& dead, size_t limit) {
  const size_t size = dead.size();
  Counts counts(size + 1);
  for (size_t lead = 0; lead < std::min(limit, size); ++lead) {
    if (dead[lead]) continue;
    Runs runs{std::vector<Counts>(limit, Counts(size + 1))};
    runs.by_tail[0][lead] = 1;
    for (size_t i = lead + 1; i < size; ++i) runs.Add(dead[i]);
    for (size_t tail = 0; tail + lead < limit; ++tail)
      for (size_t j = 0; j <= size; ++j) counts[j] += runs.by_tail[tail][j];
  }
  return counts;
}

// j-subsets that include what is dead already, harmless or not.
Counts AllSubsets(const std::vector<bool>& dead) {
  const auto fixed = static_cast<size_t>(std::count(dead.begin(), dead.end(), true));
  Counts counts(dead.size() + 1);
  for (size_t j = fixed; j <= dead.size(); ++j) counts[j] = Choose(dead.size() - fixed, j - fixed);
  return counts;
}

// P(a part of the group is lost), if each member that is not dead already dies with `p`.
long double LostWith(const PeerGroup& group, const std::vector<bool>& dead, long double p) {
  const Counts all = AllSubsets(dead), harmless = HarmlessSubsets(group, dead);
  const auto fixed = static_cast<size_t>(std::count(dead.begin(), dead.end(), true));
  long double lost = 0;
  for (size_t j = fixed; j < all.size(); ++j)
    lost += (all[j] - harmless[j]) * std::pow(p, static_cast<long double>(j - fixed)) *
            std::pow(1 - p, static_cast<long double>(dead.size() - j));
  return std::clamp<long double>(lost, 0, 1);
}

// How often in a node's mean time a first death begins a window in which the group loses a part.
long double LossesPerMeanTime(const PeerGroup& group, long double p) {
  const size_t size = group.members.size();
  const std::vector<bool> none(size);
  const Counts all = AllSubsets(none), harmless = HarmlessSubsets(group, none);
  long double losses = 0;
  for (size_t j = 1; j <= size; ++j)
    losses += static_cast<long double>(j) * (all[j] - harmless[j]) *
              std::pow(p, static_cast<long double>(j - 1)) *
              std::pow(1 - p, static_cast<long double>(size - j));
  return losses;
}

// Where a member of a domain stands.
struct Seat {
  size_t group = 0, member = 0;
};

// The seats of each domain.
std::vector<std::vector<Seat>> DomainsOf(const std::vector<PeerGroup>& groups) {
  std::map<std::string, std::vector<Seat>> named;
  std::vector<std::vector<Seat>> domains;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t m = 0; m < groups[g].members.size(); ++m) {
      const std::string& name = groups[g].members[m].failure_domain;
      if (name.empty()) {
        domains.push_back({Seat{g, m}});
      } else {
        named[name].push_back(Seat{g, m});
      }
    }
  }
  for (auto& [name, seats] : named) domains.push_back(std::move(seats));
  return domains;
}

// Members that are dead, of the groups in which some are.
using DeadMembers = std::map<size_t, std::vector<bool>>;

void Kill(const std::vector<PeerGroup>& groups, const std::vector<Seat>& seats, DeadMembers& dead) {
  for (const Seat& seat : seats) {
    std::vector<bool>& members = dead[seat.group];
    members.resize(groups[seat.group].members.size());
    members[seat.member] = true;
  }
}

bool Loses(const std::vector<PeerGroup>& groups, const DeadMembers& dead) {
  return std::any_of(dead.begin(), dead.end(), [&](const auto& one) {
    const auto count = static_cast<size_t>(std::count(one.second.begin(), one.second.end(), true));
    if (count <= groups[one.first].shape.parity) return false;
    return HarmlessSubsets(groups[one.first], one.second)[count] == 0;
  });
}

std::vector<double> LostByNodes(const std::vector<PeerGroup>& groups, size_t nodes,
                                unsigned most_dead) {
  const size_t most = std::min<size_t>(most_dead, nodes);
  Counts harmless(most + 1);
  harmless[0] = 1;
  std::map<size_t, Counts> by_size;  // groups of one size are alike
  for (const PeerGroup& group : groups) {
    auto [place, fresh] = by_size.try_emplace(group.members.size());
    if (fresh) place->second = HarmlessSubsets(group, std::vector<bool>(group.members.size()));
    Counts next(most + 1);
    for (size_t a = 0; a <= most; ++a)
      for (size_t b = 0; b < place->second.size() && a + b <= most; ++b)
        next[a + b] += harmless[a] * place->second[b];
    harmless = std::move(next);
  }
  std::vector<double> lost;
  for (size_t f = 0; f <= most; ++f) {
    const long double kept = harmless[f] / Choose(nodes, f);
    lost.push_back(static_cast<double>(std::clamp<long double>(1 - kept, 0, 1)));
  }
  return lost;
}

size_t LargestOf(const std::vector<std::vector<Seat>>& domains) {
  size_t largest = 1;
  for (const std::vector<Seat>& seats : domains) largest = std::max(largest, seats.size());
  return largest;
}

std::vector<double> LostByDomains(const std::vector<PeerGroup>& groups,
                                  const std::vector<std::vector<Seat>>& domains) {
  const size_t count = domains.size();
  const bool of_one_node = std::all_of(domains.begin(), domains.end(),
                                       [](const auto& seats) { return seats.size() == 1; });
  if (of_one_node) return LostByNodes(groups, count, kMostDomains);
  std::vector<double> lost = {0};
  size_t losing = 0;
  for (const std::vector<Seat>& seats : domains) {
    DeadMembers dead;
    Kill(groups, seats, dead);
    if (Loses(groups, dead)) ++losing;
  }
  lost.push_back(static_cast<double>(losing) / static_cast<double>(count));
  const size_t pairs = count * (count - 1) / 2;
  if (pairs == 0 || pairs > kMostSeats / (2 * LargestOf(domains))) return lost;
  losing = 0;
  for (size_t a = 0; a < count; ++a) {
    for (size_t b = a + 1; b < count; ++b) {
      DeadMembers dead;
      Kill(groups, domains[a], dead);
      Kill(groups, domains[b], dead);
      if (Loses(groups, dead)) ++losing;
    }
  }
  lost.push_back(static_cast<double>(losing) / static_cast<double>(pairs));
  return lost;
}

// The sum over all domains of P(a part is lost), if the domain is dead and others die with `p`.
long double LossesOfDomains(const std::vector<PeerGroup>& groups,
                            const std::vector<std::vector<Seat>>& domains, long double p) {
  std::map<size_t, long double> by_size;  // log P(a group of that size keeps all)
  long double kept_by_all = 0;
  const auto untouched = [&](const PeerGroup& group) {
    auto [place, fresh] = by_size.try_emplace(group.members.size());
    if (fresh) {
      const std::vector<bool> none(group.members.size());
      place->second = std::log1p(-LostWith(group, none, p));
    }
    return place->second;
  };
  for (const PeerGroup& group : groups) kept_by_all += untouched(group);
  long double losses = 0;
  for (const std::vector<Seat>& seats : domains) {
    DeadMembers dead;
    Kill(groups, seats, dead);
    long double kept = kept_by_all;
    for (const auto& [group, members] : dead)
      kept += std::log1p(-LostWith(groups[group], members, p)) - untouched(groups[group]);
    losses += std::isnan(kept) ? 1 : -std::expm1(kept);
  }
  return losses;
}

double LoadsAYear(const std::vector<PeerGroup>& groups,
                  const std::vector<std::vector<Seat>>& domains, const FailureRates& rates) {
  const long double p = -std::expm1(-static_cast<long double>(rates.window_minutes) /
                                    (kMinutesADay * rates.node_mtbf_days));
  std::map<size_t, long double> by_size;
  long double losses = 0;
  for (const PeerGroup& group : groups) {
    auto [place, fresh] = by_size.try_emplace(group.members.size());
    if (fresh) place->second = LossesPerMeanTime(group, p);
    losses += place->second;
  }
  long double loads = losses * kDaysAYear / rates.node_mtbf_days;
  if (rates.domain_mtbf_days)
    loads += LossesOfDomains(groups, domains, p) * kDaysAYear / *rates.domain_mtbf_days;
  return static_cast<double>(loads);
}

Status CheckRates(const FailureRates& rates) {
  const auto good = [](double value) { return value > 0 && std::isfinite(value); };
  if (!good(rates.node_mtbf_days)) return Refuse("the mean time between failures is not above 0");
  if (rates.domain_mtbf_days && !good(*rates.domain_mtbf_days))
    return Refuse("the mean time between failures of a domain is not above 0");
  if (!good(rates.window_minutes)) return Refuse("the unprotected window is not above 0");
  return {};
}

}  // namespace

std::vector<long double> HarmlessSubsets(const PeerGroup& group, const std::vector<bool>& dead) {
  const size_t size = group.members.size();
  CKPT_CHECK(dead.size() == size);
  if (group.shape.units() < size) {
    CKPT_CHECK(!group.shape.cuts());  // copies on the next members of the ring
    return RingsWithoutARun(dead, size_t{group.shape.parity} + 1);
  }
  Counts counts = AllSubsets(dead);
  for (size_t j = size_t{group.shape.parity} + 1; j < counts.size(); ++j) counts[j] = 0;
  return counts;
}

Result<Survival> SurvivalOf(const std::vector<PeerNode>& nodes, const ProtectScheme& scheme,
                            const FailureRates& rates, unsigned most_dead) {
  CKPT_RETURN_IF_ERROR(CheckRates(rates));
  if (most_dead > kMostDead) return Refuse("at most ", kMostDead, " dead nodes are counted");
  CKPT_ASSIGN_OR_RETURN(const std::vector<PeerGroup> groups, PlaceNodes(nodes, scheme));
  const std::vector<std::vector<Seat>> domains = DomainsOf(groups);
  Survival survival;
  survival.nodes = nodes.size();
  survival.groups = groups.size();
  survival.domains = domains.size();
  survival.smallest_group = nodes.size();
  for (const PeerGroup& group : groups) {
    const size_t size = group.members.size();
    survival.smallest_group = std::min(survival.smallest_group, size);
    survival.largest_group = std::max(survival.largest_group, size);
    const double kept = static_cast<double>(group.shape.parity) / group.shape.data;
    const double sent = static_cast<double>(group.shape.units() - 1) / group.shape.data;
    if (scheme.kind != ProtectScheme::kLocal) survival.sent += sent * static_cast<double>(size);
    survival.extra_memory += kept * static_cast<double>(size);
    survival.largest_extra_memory = std::max(survival.largest_extra_memory, kept);
  }
  survival.extra_memory /= static_cast<double>(nodes.size());
  survival.sent /= static_cast<double>(nodes.size());
  survival.lost_by_nodes = LostByNodes(groups, nodes.size(), most_dead);
  survival.lost_by_domains = LostByDomains(groups, domains);
  survival.loads_a_year = LoadsAYear(groups, domains, rates);
  return survival;
}

}  // namespace ckptfs
