// SPDX-License-Identifier: Apache-2.0
//
// The digest that ranks compare of the memory that they are said to hold alike.
//
// Thread safety: a pure function of the memory.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/digest.h"

namespace ckptfs {

inline constexpr uint64_t kReplicaBytes = uint64_t{16} << 20;  // two milliseconds' worth
inline constexpr uint64_t kSmallTensor = uint64_t{64} << 10;

// Returns the digest of all small tensors, as far as they are kReplicaBytes together, and of all
// others if they are at most so much, else of about that many bytes of them, in windows that `step`
// chooses as if by chance: whatever steps are saved, a byte is digested at one save of size /
// kReplicaBytes, on average.
Digest ReplicaDigestOf(std::span<const std::span<const std::byte>> memory, uint64_t step);

}  // namespace ckptfs
