// SPDX-License-Identifier: Apache-2.0
//
// Pieces of devices' memory, the digests that a kernel makes of them, and the copies that
// another makes on the device (cuda_kernels.cu).  The kernels take and give arrays in
// page-locked memory of the host: one DeviceDigest for each DevicePiece, and DeviceMoves.
//
//   DevicePiece   = address u64 | bytes u64
//   DeviceDigest  = high u64 | low u64        as Digest (core/base/digest.h)
//   DeviceMove    = from u64 | to u64 | bytes u64
//
// A third kernel has its moves among its parameters (PackedMoves), for copies that begin at any
// time: nothing has to be kept until it has run.
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

struct DeviceMove {
  uint64_t from = 0;
  uint64_t to = 0;
  uint64_t bytes = 0;
};

struct PackedMove {
  uint64_t from = 0;
  uint32_t to = 0;  // behind PackedMoves::to
  uint32_t bytes = 0;
};

// The parameter of a kernel, which has 4 KiB for all of them.
struct PackedMoves {
  static constexpr size_t kMost = 250;
  uint64_t to = 0;
  PackedMove moves[kMost] = {};
};
static_assert(sizeof(PackedMoves) <= 4096);

inline constexpr const char* kDigestKernel = "ckptfs_digest";
inline constexpr unsigned kDigestBlock = 64;  // threads: 16 pieces
inline constexpr const char* kGatherKernel = "ckptfs_gather";
inline constexpr const char* kPackKernel = "ckptfs_pack";
inline constexpr unsigned kGatherBlock = 256;                 // threads, of one move
inline constexpr uint64_t kLargestMove = uint64_t{64} << 10;  // so that a device has enough of them

}  // namespace ckptfs
