// SPDX-License-Identifier: Apache-2.0
#include "snapshot/trainer/replica_digest.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace ckptfs {
namespace {

Digest Of(const std::vector<std::string>& memory, uint64_t step = 0) {
  std::vector<std::span<const std::byte>> spans;
  for (const std::string& one : memory) spans.push_back(std::as_bytes(std::span(one)));
  return ReplicaDigestOf(spans, step);
}

TEST(ReplicaDigestTest, OfLittleMemoryEveryByteCounts) {
  std::vector<std::string> memory{std::string(9000, 'a'), "", std::string(5, 'b')};
  const Digest before = Of(memory);
  EXPECT_EQ(Of(memory, 7), before);
  for (const auto& [which, at] : {std::pair(0, 0), {0, 4096}, {0, 8999}, {2, 4}}) {
    std::vector<std::string> other = memory;
    ++other[static_cast<size_t>(which)][static_cast<size_t>(at)];
    EXPECT_NE(Of(other), before);
  }
}

// A norm or a codebook beside large weights is compared at every save.
TEST(ReplicaDigestTest, SmallTensorsCountAtEverySave) {
  const std::vector<std::string> memory{std::string(2 * kReplicaBytes, 'a'),
                                        std::string(9000, 'b')};
  std::vector<std::string> other = memory;
  ++other[1][5000];
  for (uint64_t step = 0; step < 8; ++step) EXPECT_NE(Of(memory, step), Of(other, step));
}

// One byte of much is seen at one save of as many as there is more than is looked at, whichever
// steps a job saves.
TEST(ReplicaDigestTest, OfMuchMemoryEveryByteCountsAfterSomeSaves) {
  const std::vector<std::string> memory{std::string(2 * kReplicaBytes, 'a'),
                                        std::string(kReplicaBytes, 'b')};
  std::vector<std::vector<std::string>> others(3, memory);
  for (size_t window = 0; window < 3; ++window) ++others[window][1][4096 * window + 5];
  for (const uint64_t every : {1, 3, 100}) {
    std::vector<int> seen(3);
    for (uint64_t save = 0; save < 15; ++save) {
      const Digest whole = Of(memory, save * every);
      int of_save = 0;
      for (size_t window = 0; window < 3; ++window)
        of_save += Of(others[window], save * every) != whole ? ++seen[window] > 0 : 0;
      EXPECT_EQ(of_save, 1);
    }
    for (const int times : seen) EXPECT_GT(times, 0) << every;
  }
}

}  // namespace
}  // namespace ckptfs
