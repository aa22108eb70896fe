// SPDX-License-Identifier: Apache-2.0

#include "core/redundancy/comparison_ring.h"

namespace ckptfs {

std::vector<RingRound> ComparisonRounds(size_t workers) {
  std::vector<RingRound> rounds(workers / 2);
  for (size_t i = 0; i < rounds.size(); ++i) {
    // Half an even ring further on stand the same pairs twice.
    const bool opposite = 2 * (i + 1) == workers;
    const size_t askers = opposite ? workers / 2 : workers;
    for (size_t worker = 0; worker < askers; ++worker)
      rounds[i].emplace_back(worker, (worker + i + 1) % workers);
  }
  return rounds;
}

}  // namespace ckptfs
