// SPDX-License-Identifier: Apache-2.0
//
// Survival says how a placement fares when nodes die: exact counts over the groups that
// PlaceNodes() made, not a simulation.
//
//   nodes     F of the job's nodes die together, each choice as likely as any other
//   domains   all nodes of D failure domains die together, likewise
//   a year    nodes (and domains, if they have a mean time) die independently, at a constant
//             rate; a node's part is unprotected for `window` after a death.  A load from the
//             store is needed if the others that die within the window of a first death make
//             the groups lose a part.
//
// A part is lost if more of the nodes that keep its units die than it has parity; with kOff if its
// node dies.  Nodes without a failure domain are domains of one node.
//
// Thread safety: pure functions.
// Units: probabilities from 0 to 1; memory and traffic in parts of one node; times as named.

#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/base/result.h"
#include "core/peer/placement.h"

namespace ckptfs {

inline constexpr unsigned kMostDead = 16;

// A year of 365 days.
struct FailureRates {
  double node_mtbf_days = 0;               // mean time between failures of one node
  std::optional<double> domain_mtbf_days;  // of one whole domain; absent: it never dies
  double window_minutes = 0;
};

struct Survival {
  size_t nodes = 0, groups = 0, domains = 0;
  size_t smallest_group = 0, largest_group = 0;
  // [F]: some part is lost when F nodes die; F from 0 to the number asked for.
  std::vector<double> lost_by_nodes;
  // [D]: the same of D whole domains, D from 0 to 2; shorter where there are too few domains,
  // or too many to look at each pair.
  std::vector<double> lost_by_domains;
  double extra_memory = 0;          // mean over nodes, beyond one part
  double largest_extra_memory = 0;  // of the node that keeps most
  double sent = 0;                  // mean over nodes, over the network
  double loads_a_year = 0;          // steps that must be read from the store
};

// The numbers of j-subsets of a group's members, j from 0 to all of them, which include the
// members that are `dead` already and lose nothing.  `dead` has one entry for each member.
std::vector<long double> HarmlessSubsets(const PeerGroup& group, const std::vector<bool>& dead);

// kInvalid: what PlaceNodes() refuses, most_dead > kMostDead, a time that is not above 0.
Result<Survival> SurvivalOf(const std::vector<PeerNode>& nodes, const ProtectScheme& scheme,
                            const FailureRates& rates, unsigned most_dead);

}  // namespace ckptfs
