// SPDX-License-Identifier: Apache-2.0

#include "core/base/parallel.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace ckptfs {
namespace {

// A build with ThreadSanitizer also shows here that plain memory may be used
// on both sides of the call.
TEST(ParallelForTest, EveryIndexOnceAndTheCallerSeesWhatWasWritten) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{1000}}) {
    std::vector<size_t> input(count);
    std::iota(input.begin(), input.end(), size_t{7});
    std::vector<size_t> output(count);
    ParallelFor(count, [&](size_t i) { output[i] += input[i]; });
    EXPECT_EQ(output, input);
  }
}

TEST(ParallelForTest, WorkMayBeParallelItself) {
  std::vector<std::vector<size_t>> sums(20);
  ParallelFor(sums.size(), [&](size_t i) {
    std::vector<size_t> parts(50);
    ParallelFor(parts.size(), [&](size_t k) { parts[k] = i * k; });
    sums[i] = std::move(parts);
  });
  for (size_t i = 0; i < sums.size(); ++i) {
    EXPECT_EQ(std::accumulate(sums[i].begin(), sums[i].end(), size_t{0}), i * 49 * 50 / 2);
  }
}

}  // namespace
}  // namespace ckptfs
