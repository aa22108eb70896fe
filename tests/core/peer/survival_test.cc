// SPDX-License-Identifier: Apache-2.0

#include "core/peer/survival.h"

#include <bit>
#include <cmath>
#include <map>
#include <numeric>
#include <random>

#include "gmock/gmock.h"
#include "tests/core/peer/peer_nodes.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;

// 419 interruptions of 2,048 nodes in 54 days.
constexpr FailureRates kRates{
    .node_mtbf_days = 54.0 * 2048 / 419, .domain_mtbf_days = {}, .window_minutes = 15};

Survival Of(size_t nodes, std::string_view scheme, unsigned most_dead = 4) {
  return SurvivalOf(NodesOf(nodes), SchemeOf(scheme), kRates, most_dead).value();
}

// By who keeps which unit alone: some member's files miss more units than they have parity.
bool Loses(const PeerGroup& group, const std::vector<bool>& dead) {
  for (size_t member = 0; member < group.members.size(); ++member) {
    size_t missing = 0;
    for (const size_t holder : UnitHolders(group, member)) missing += dead[holder] ? 1 : 0;
    if (missing > group.shape.parity) return true;
  }
  return false;
}

// A placement whose nodes are killed by name.
class Cluster {
 public:
  Cluster(std::vector<PeerNode> nodes, const ProtectScheme& scheme)
      : nodes_(std::move(nodes)), groups_(PlaceNodes(nodes_, scheme).value()) {
    for (size_t g = 0; g < groups_.size(); ++g)
      for (size_t m = 0; m < groups_[g].members.size(); ++m)
        seats_[groups_[g].members[m].name] = {g, m};
  }
  const std::vector<PeerNode>& nodes() const { return nodes_; }
  bool LosesWithout(const std::vector<size_t>& dead) const {
    std::map<size_t, std::vector<bool>> by_group;
    for (const size_t node : dead) {
      const auto [group, member] = seats_.at(nodes_[node].name);
      by_group[group].resize(groups_[group].members.size());
      by_group[group][member] = true;
    }
    for (const auto& [group, members] : by_group)
      if (Loses(groups_[group], members)) return true;
    return false;
  }

 private:
  std::vector<PeerNode> nodes_;
  std::vector<PeerGroup> groups_;
  std::map<std::string, std::pair<size_t, size_t>> seats_;
};

std::vector<size_t> Bits(uint32_t mask) {
  std::vector<size_t> bits;
  for (size_t i = 0; i < 32; ++i)
    if ((mask >> i & 1) != 0) bits.push_back(i);
  return bits;
}

TEST(SurvivalTest, ProbabilitiesOfTheTableOf120Nodes) {
  const std::map<std::string, std::vector<double>> kept = {{"off", {0, 0, 0, 0}},
                                                           {"copy", {1, .9916, .9748, .9498}},
                                                           {"local", {1, .9916, .9748, .9498}},
                                                           {"copy:2", {1, 1, .9999, .9994}},
                                                           {"ec:4+1", {1, .9664, .9009, .8085}},
                                                           {"ec:4+2", {1, 1, .9986, .9944}},
                                                           {"ec:8+2", {1, 1, .9949, .9804}}};
  for (const auto& [scheme, expected] : kept) {
    const Survival survival = Of(120, scheme);
    ASSERT_EQ(survival.lost_by_nodes.size(), 5u);
    EXPECT_EQ(survival.lost_by_nodes[0], 0);
    for (size_t f = 1; f <= 4; ++f)
      EXPECT_EQ(std::round((1 - survival.lost_by_nodes[f]) * 1e4) / 1e4, expected[f - 1])
          << scheme << ", " << f;
  }
}

TEST(SurvivalTest, CostsAreTheSchemes) {
  const std::map<std::string, std::pair<double, double>> costs = {
      {"off", {0, 0}},      {"local", {1, 0}},      {"copy", {1, 1}},        {"copy:2", {2, 2}},
      {"ec:4+1", {.25, 1}}, {"ec:4+2", {.5, 1.25}}, {"ec:8+2", {.25, 1.125}}};
  for (const auto& [scheme, cost] : costs) {
    EXPECT_DOUBLE_EQ(Of(120, scheme).extra_memory, cost.first) << scheme;
    EXPECT_EQ(Of(120, scheme).sent, cost.second) << scheme;
  }
  // Two groups, of 5 + 1 and 5 + 2 members.
  const Survival uneven = Of(11, "ec:4+1");
  EXPECT_EQ(uneven.smallest_group, 5u);
  EXPECT_EQ(uneven.largest_group, 6u);
  EXPECT_DOUBLE_EQ(uneven.largest_extra_memory, .25);
  EXPECT_DOUBLE_EQ(uneven.extra_memory, (5 * .25 + 6 * .2) / 11);
  EXPECT_DOUBLE_EQ(Of(11, "ec:4+2").sent, 10. / 9);
}

TEST(SurvivalTest, LoadsAYearOf2040Nodes) {
  const auto loads = [](std::string_view scheme) { return Of(2040, scheme).loads_a_year; };
  EXPECT_EQ(std::round(loads("off")), 2821);
  EXPECT_NEAR(loads("copy"), 0.11, 0.005);
  EXPECT_NEAR(loads("ec:4+1"), 0.45, 0.005);
  EXPECT_NEAR(loads("ec:8+2"), 0.0002, 0.00005);
  EXPECT_LT(loads("ec:4+2"), 0.00005);
}

// All subsets of small clusters, those with groups of uneven sizes too.
TEST(SurvivalTest, CountsEqualAnEnumeration) {
  for (const char* text : {"off", "copy", "copy:2", "copy:3", "ec:2+1", "ec:2+2", "ec:3+2"}) {
    const ProtectScheme scheme = SchemeOf(text);
    for (size_t count = scheme.GroupSize(); count <= 10; ++count) {
      const Cluster cluster(NodesOf(count), scheme);
      std::vector<double> lost(count + 1), all(count + 1);
      for (uint32_t mask = 0; mask < 1u << count; ++mask) {
        const auto dead = static_cast<size_t>(std::popcount(mask));
        ++all[dead];
        if (cluster.LosesWithout(Bits(mask))) ++lost[dead];
      }
      const Survival survival =
          SurvivalOf(cluster.nodes(), scheme, kRates, static_cast<unsigned>(count)).value();
      for (size_t f = 0; f <= count; ++f)
        EXPECT_NEAR(survival.lost_by_nodes[f], lost[f] / all[f], 1e-12) << text << " " << count;
    }
  }
}

// With members that are dead already, wherever they stand.
TEST(SurvivalTest, HarmlessSubsetsEqualAnEnumeration) {
  for (const auto& [text, size] :
       {std::pair("copy", 3u), {"copy:2", 5u}, {"copy:3", 7u}, {"ec:3+2", 6u}}) {
    const PeerGroup group = PlaceNodes(NodesOf(size), SchemeOf(text)).value().at(0);
    for (uint32_t already = 0; already < 1u << size; ++already) {
      const auto members = [&](uint32_t mask) {
        std::vector<bool> dead(size);
        for (const size_t member : Bits(mask)) dead[member] = true;
        return dead;
      };
      std::vector<long double> harmless(size + 1);
      for (uint32_t mask = 0; mask < 1u << size; ++mask)
        if ((mask & already) == already && !Loses(group, members(mask)))
          ++harmless[static_cast<size_t>(std::popcount(mask))];
      EXPECT_EQ(HarmlessSubsets(group, members(already)), harmless) << text << " " << already;
    }
  }
}

TEST(SurvivalTest, ProbabilitiesEqualAMonteCarloOverThePlacement) {
  constexpr size_t kTrials = 4000;
  std::mt19937 random(3);
  for (const auto& [text, count, dead] : {std::tuple("copy", 41, 4),
                                          {"copy:2", 20, 6},
                                          {"ec:4+1", 47, 3},
                                          {"ec:4+2", 33, 6},
                                          {"ec:8+2", 43, 5}}) {
    const Cluster cluster(NodesOf(static_cast<size_t>(count), 4), SchemeOf(text));
    std::vector<size_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), size_t{0});
    size_t lost = 0;
    for (size_t trial = 0; trial < kTrials; ++trial) {
      for (size_t i = 0; i < static_cast<size_t>(dead); ++i)
        std::swap(order[i], order[i + random() % (order.size() - i)]);
      const std::vector<size_t> victims(order.begin(), order.begin() + dead);
      if (cluster.LosesWithout(victims)) ++lost;
    }
    const double p = SurvivalOf(cluster.nodes(), SchemeOf(text), kRates, 8)
                         .value()
                         .lost_by_nodes[static_cast<size_t>(dead)];
    const double deviation = std::sqrt(p * (1 - p) / kTrials);
    EXPECT_GT(p, 0.01) << text;
    EXPECT_NEAR(static_cast<double>(lost) / kTrials, p, 4 * deviation) << text;
  }
}

// Schemes of one cluster, those with a single large group among them, where copies go round a ring.
void ExpectEnumerated(size_t count, size_t per_domain, std::string_view text) {
  const Cluster cluster(NodesOf(count, per_domain), SchemeOf(text));
  const size_t domains = (count + per_domain - 1) / per_domain;
  const auto dead = [&](size_t a, size_t b) {
    std::vector<size_t> nodes;
    for (size_t i = 0; i < count; ++i)
      if (i / per_domain == a || i / per_domain == b) nodes.push_back(i);
    return nodes;
  };
  double one = 0, two = 0, pairs = 0;
  for (size_t a = 0; a < domains; ++a) {
    one += cluster.LosesWithout(dead(a, a)) ? 1 : 0;
    for (size_t b = a + 1; b < domains; ++b, ++pairs)
      two += cluster.LosesWithout(dead(a, b)) ? 1 : 0;
  }
  const Survival survival = SurvivalOf(cluster.nodes(), SchemeOf(text), kRates, 1).value();
  EXPECT_EQ(survival.domains, domains);
  ASSERT_EQ(survival.lost_by_domains.size(), 3u);
  EXPECT_DOUBLE_EQ(survival.lost_by_domains[1], one / static_cast<double>(domains)) << text;
  EXPECT_DOUBLE_EQ(survival.lost_by_domains[2], two / pairs) << text << count;
}

TEST(SurvivalTest, DomainsAreEnumerated) {
  for (const char* text : {"copy", "copy:2", "ec:4+1", "ec:4+2"})
    for (const size_t per_domain : {2, 5, 9}) ExpectEnumerated(23, per_domain, text);
  for (const size_t per_domain : {2, 3, 4}) {
    ExpectEnumerated(5, per_domain, "copy:2");
    ExpectEnumerated(7, per_domain, "copy:3");
    ExpectEnumerated(9, per_domain, "copy:4");
    ExpectEnumerated(11, per_domain, "copy:5");
  }
}

// A rack of four dies; the domain-aware placement keeps everything, one that ignores racks would
// not.
TEST(SurvivalTest, ARackIsSurvivedIfThereAreRacksEnough) {
  EXPECT_EQ(SurvivalOf(NodesOf(120, 4), SchemeOf("copy"), kRates, 1).value().lost_by_domains[1], 0);
  EXPECT_EQ(SurvivalOf(NodesOf(120, 4), SchemeOf("ec:8+2"), kRates, 1).value().lost_by_domains[1],
            0);
  // 120 nodes in two racks: groups of ten hold five of each.
  EXPECT_EQ(SurvivalOf(NodesOf(120, 60), SchemeOf("ec:8+2"), kRates, 1).value().lost_by_domains[1],
            1);
}

TEST(SurvivalTest, LoadsOfDomainsAreAdded) {
  FailureRates rates = kRates;
  rates.domain_mtbf_days = 365;
  const auto loads = [&](size_t per_domain) {
    return SurvivalOf(NodesOf(12, per_domain), SchemeOf("copy"), rates, 1).value().loads_a_year;
  };
  const double nodes_alone = Of(12, "copy").loads_a_year;
  // Two racks of six lose nothing by themselves; a window of 15 minutes adds little.
  const double p = -std::expm1(-15 / (1440 * rates.node_mtbf_days));
  EXPECT_NEAR(loads(6), nodes_alone + 2 * (1 - std::pow(1 - p, 6)), 1e-9);
  // One rack of twelve: once a year all is lost.
  EXPECT_NEAR(loads(12), nodes_alone + 1, 1e-9);
}

TEST(SurvivalTest, WhatCannotBeCountedIsRefused) {
  EXPECT_THAT(SurvivalOf(NodesOf(4), SchemeOf("copy"), kRates, 17).error().message,
              HasSubstr("at most 16"));
  EXPECT_THAT(SurvivalOf(NodesOf(4), SchemeOf("ec:8+2"), kRates, 1).error().message,
              HasSubstr("needs 10 nodes"));
  for (const FailureRates& rates : {FailureRates{0, {}, 15}, FailureRates{1, {}, 0},
                                    FailureRates{1, 0, 15}, FailureRates{std::nan(""), {}, 15}})
    EXPECT_THAT(SurvivalOf(NodesOf(4), SchemeOf("copy"), rates, 1).error().message,
                HasSubstr("not above 0"));
}

}  // namespace
}  // namespace ckptfs
