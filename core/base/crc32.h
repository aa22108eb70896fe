// SPDX-License-Identifier: Apache-2.0
//
// The checksum of zip files (CRC-32 of IEEE 802.3, reflected), for which torch
// keeps one per record.
//
// Thread safety: pure.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ckptfs {

// The sum of all bytes so far, whose sum is `before` (0: none), and `bytes`.
uint32_t Crc32(uint32_t before, std::span<const std::byte> bytes);

}  // namespace ckptfs
