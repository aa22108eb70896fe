// SPDX-License-Identifier: Apache-2.0

#include "snapshot/trainer/replica_digest.h"

#include <algorithm>

namespace ckptfs {

Digest ReplicaDigestOf(std::span<const std::span<const std::byte>> memory, uint64_t step) {
  constexpr uint64_t kWindow = 4096;
  uint64_t all = 0;
  for (const auto& one : memory) all += one.size();
  // Digests one window of every `apart`, and another one in the next step.
  const uint64_t apart = std::max<uint64_t>(1, (all + kReplicaBytes - 1) / kReplicaBytes);
  DigestStream digest;
  uint64_t window = 0;
  for (const auto& one : memory) {
    for (uint64_t at = 0; at < one.size(); at += kWindow, ++window) {
      if (window % apart != step % apart) continue;
      digest.Add(one.subspan(at, std::min<uint64_t>(kWindow, one.size() - at)));
    }
  }
  return digest.Finish();
}

}  // namespace ckptfs
