// SPDX-License-Identifier: Apache-2.0
//
// The kernels that digest pieces of a device's memory and that copy others beside each other
// (device_pieces.h).  Four threads digest a piece (piece_lanes.h), a block copies one.  They read
// where the pieces lie, and write digests, in page-locked memory of the host.

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

// Copies words of a move whose ends are multiples of a word's size.  Four loads are under way at a
// time: memory is far.
template <class Word>
__device__ void MoveWords(const DeviceMove& move) {
  const auto* const from = reinterpret_cast<const Word*>(move.from);
  auto* const to = reinterpret_cast<Word*>(move.to);
  const uint64_t count = move.bytes / sizeof(Word);
  const uint64_t step = blockDim.x;
  uint64_t i = threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const Word a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    to[i] = a;
    to[i + step] = b;
    to[i + 2 * step] = c;
    to[i + 3 * step] = d;
  }
  for (; i < count; i += step) to[i] = from[i];
}

__device__ void Move(const DeviceMove& move) {
  const uint64_t ends = move.from | move.to | move.bytes;
  if (ends % 16 == 0) {
    MoveWords<ulonglong2>(move);
  } else if (ends % 8 == 0) {
    MoveWords<uint64_t>(move);
  } else if (ends % 4 == 0) {
    MoveWords<uint32_t>(move);
  } else {
    MoveWords<unsigned char>(move);
  }
}

}  // namespace

extern "C" __global__ void ckptfs_gather(const DeviceMove* moves) { Move(moves[blockIdx.x]); }

extern "C" __global__ void ckptfs_pack(const __grid_constant__ PackedMoves packed) {
  const PackedMove& move = packed.moves[blockIdx.x];
  Move({move.from, packed.to + move.to, move.bytes});
}

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
