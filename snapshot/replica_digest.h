// SPDX-License-Identifier: Apache-2.0
//
// What ranks compare of the memory that they are said to hold alike.
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

// Of all bytes where they are kReplicaBytes or fewer; else of about so many, in windows whose
// places go on with `step`: after as many steps as the whole is larger all of it was looked at.
Digest ReplicaDigestOf(std::span<const std::span<const std::byte>> memory, uint64_t step);

}  // namespace ckptfs
