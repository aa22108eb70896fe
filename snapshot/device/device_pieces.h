// SPDX-License-Identifier: Apache-2.0
//
// Pieces of devices' memory and the digests that a kernel makes of them (cuda_digest.cu).  The
// kernel takes and gives arrays in page-locked memory of the host, one DeviceDigest for each
// DevicePiece.
//
//   DevicePiece   = address u64 | bytes u64
//   DeviceDigest  = high u64 | low u64        as Digest (core/base/digest.h)
//
// Thread safety: values.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>

namespace ckptfs {

struct DevicePiece {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

struct DeviceDigest {
  uint64_t high = 0;
  uint64_t low = 0;
  bool operator==(const DeviceDigest&) const = default;
};

inline constexpr const char* kDigestKernel = "ckptfs_digest";
inline constexpr unsigned kDigestBlock = 64;  // threads: 16 pieces

}  // namespace ckptfs
