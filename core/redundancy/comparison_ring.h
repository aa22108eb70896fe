// SPDX-License-Identifier: Apache-2.0
//
// The order in which AdaCheck's redundancy detector has workers compare what they hold
// (Algorithm 1): in round i each worker meets the one that stands i + 1 places further on the
// ring.  Nobody meets more than two in a round, so that no worker is asked by all at once, and
// after half the ring each pair has met once.
//
// Thread safety: pure function.

#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace ckptfs {

// The pairs of one round; none occurs in another round, in either order.
using RingRound = std::vector<std::pair<size_t, size_t>>;

// `workers` / 2 rounds, rounded down.
std::vector<RingRound> ComparisonRounds(size_t workers);

}  // namespace ckptfs
