// SPDX-License-Identifier: Apache-2.0
//
// The kernel that digests pieces of a device's memory (device_pieces.h).  Four threads
// a piece (piece_lanes.h); it reads where the pieces lie, and writes their digests, in page-locked
// memory of the host.

#include "snapshot/device/device_pieces.h"
#include "snapshot/device/piece_lanes.h"

namespace ckptfs {
namespace {

__constant__ const PieceSecret kSecret = MakePieceSecret();

// Sixteen bytes at any address: of words that have one of them at least, so that nothing beside
// the piece's own memory is touched.
__device__ __forceinline__ PieceWords LoadAt(const char* address) {
  const auto place = reinterpret_cast<unsigned long long>(address);
  const auto* const base = reinterpret_cast<const ulonglong2*>(place & ~15ull);
  const unsigned past = static_cast<unsigned>(place & 15) * 8;  // bits
  const ulonglong2 one = __ldcs(base);
  if (past == 0) return {one.x, one.y};
  const ulonglong2 two = __ldcs(base + 1);
  if (past == 64) return {one.y, two.x};
  if (past < 64) {
    return {one.x >> past | one.y << (64 - past), one.y >> past | two.x << (64 - past)};
  }
  return {one.y >> (past - 64) | two.x << (128 - past),
          two.x >> (past - 64) | two.y << (128 - past)};
}

// Loads the words of a short piece, with zeros behind it.
__device__ PieceWords LoadPadded(const char* begin, uint64_t bytes, uint64_t at) {
  uint64_t words[2] = {0, 0};
  for (unsigned i = 0; i < 16; ++i) {
    if (at + i >= bytes) break;
    words[i / 8] |= static_cast<uint64_t>(static_cast<unsigned char>(begin[at + i])) << (i % 8 * 8);
  }
  return {words[0], words[1]};
}

__device__ uint64_t SumOfFour(uint64_t share) {
  share += __shfl_xor_sync(~0u, share, 1);
  return share + __shfl_xor_sync(~0u, share, 2);
}

}  // namespace

extern "C" __global__ void ckptfs_digest(const DevicePiece* pieces, DeviceDigest* digests,
                                         uint64_t count) {
  __shared__ PieceSecret secret;
  for (unsigned i = threadIdx.x; i < sizeof secret / 8; i += blockDim.x) {
    reinterpret_cast<uint64_t*>(&secret)[i] = reinterpret_cast<const uint64_t*>(&kSecret)[i];
  }
  __syncthreads();
  const uint64_t index = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kPieceThreads;
  const unsigned thread = threadIdx.x % kPieceThreads;
  const DevicePiece piece = index < count ? pieces[index] : DevicePiece{0, 0};
  const auto* const begin = reinterpret_cast<const char*>(piece.address);
  const uint64_t bytes = piece.bytes < kShortestPiece ? kShortestPiece : piece.bytes;
  PieceLanes lanes(secret, thread);
  if (piece.bytes < kShortestPiece) {
    AddPiece(lanes, bytes, thread, [&](uint64_t at) { return LoadPadded(begin, piece.bytes, at); });
  } else {
    AddPiece(lanes, bytes, thread, [&](uint64_t at) { return LoadAt(begin + at); });
  }
  const uint64_t low = SumOfFour(lanes.Low());
  const uint64_t high = SumOfFour(lanes.High());
  if (thread == 0 && index < count) {
    digests[index] = {PieceLanes::FinishHigh(high, bytes), PieceLanes::FinishLow(low, bytes)};
  }
}

}  // namespace ckptfs
