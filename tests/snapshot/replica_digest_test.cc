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

// One byte of much is seen in one of as many steps as there is more than is looked at.
TEST(ReplicaDigestTest, OfMuchMemoryEveryByteCountsAfterSomeSteps) {
  std::vector<std::string> memory{std::string(2 * kReplicaBytes, 'a'),
                                  std::string(kReplicaBytes, 'b')};
  std::vector<std::string> other = memory;
  ++other[1][kReplicaBytes / 2 + 5];
  int seen = 0;
  for (uint64_t step = 10; step < 13; ++step) seen += Of(memory, step) != Of(other, step) ? 1 : 0;
  EXPECT_EQ(seen, 1);
}

}  // namespace
}  // namespace ckptfs
