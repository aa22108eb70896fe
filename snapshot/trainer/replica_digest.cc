// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/replica_digest.h"

#include <algorithm>

namespace ckptfs {
namespace {

// A number that no regular steps repeat: jobs save every hundredth one.  The finaliser of
// splitmix64 (Steele, Lea, Flood 2014).
uint64_t Scattered(uint64_t step) {
  step += 0x9e3779b97f4a7c15;
  step = (step ^ (step >> 30)) * 0xbf58476d1ce4e5b9;
  step = (step ^ (step >> 27)) * 0x94d049bb133111eb;
  return step ^ (step >> 31);
}

}  // namespace

Digest ReplicaDigestOf(std::span<const std::span<const std::byte>> memory, uint64_t step) {
  constexpr uint64_t kWindow = 4096;
  uint64_t all = 0, small = 0;
  for (const auto& one : memory) (one.size() <= kSmallTensor ? small : all) += one.size();
  const bool whole = small <= kReplicaBytes;  // all small ones
  if (!whole) all += small;
  // Digests one window of every `apart`, and any other one at the next save.
  const uint64_t apart = std::max<uint64_t>(1, (all + kReplicaBytes - 1) / kReplicaBytes);
  const uint64_t first = Scattered(step) % apart;
  DigestStream digest;
  uint64_t window = 0;
  for (const auto& one : memory) {
    if (whole && one.size() <= kSmallTensor) {
      digest.Add(one);
      continue;
    }
    for (uint64_t at = 0; at < one.size(); at += kWindow, ++window) {
      if (window % apart != first) continue;
      digest.Add(one.subspan(at, std::min<uint64_t>(kWindow, one.size() - at)));
    }
  }
  return digest.Finish();
}

}  // namespace ckptfs
