// SPDX-License-Identifier: Apache-2.0
//
// PieceLanes is the arithmetic of XXH3-128 (xxHash 0.8, default secret, no seed) as four
// threads do it together: thread t has the accumulators 2t and 2t + 1, and reads the bytes
// [16t, 16t + 16) of every 64.  A GPU's kernel and a test on the host share it.
//
//   piece  = stripe * n, the last one ending with the piece (it may overlap the one before)
//   stripe = 64 bytes; after 16 of them the accumulators are scrambled
//
// A piece of fewer than kShortestPiece bytes is digested with zeros behind it: XXH3 has other
// rules for short texts, which are not worth a kernel.
//
// Thread safety: values.
// Units: bytes.

#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CKPTFS_DEVICE __host__ __device__ __forceinline__
#else
#define CKPTFS_DEVICE inline
#endif

namespace ckptfs {

inline constexpr uint64_t kShortestPiece = 256;
inline constexpr unsigned kPieceThreads = 4;

// The words of XXH3's secret as the threads need them: at multiples of 8, and from three odd
// offsets on.
struct PieceSecret {
  uint64_t word[24];
  uint64_t last[8];  // of the last stripe
  uint64_t low[8];   // of the digest's halves
  uint64_t high[8];
};

constexpr PieceSecret MakePieceSecret() {
  constexpr unsigned char kSecret[192] = {
      0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad,
      0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
      0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc,
      0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
      0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65,
      0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
      0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9,
      0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
      0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb,
      0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0,
      0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d,
      0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
      0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
  };
  PieceSecret secret{};
  const auto read = [&](unsigned at) {
    uint64_t word = 0;
    for (unsigned i = 0; i < 8; ++i) word |= static_cast<uint64_t>(kSecret[at + i]) << (8 * i);
    return word;
  };
  for (unsigned i = 0; i < 24; ++i) secret.word[i] = read(8 * i);
  for (unsigned i = 0; i < 8; ++i) {
    secret.last[i] = read(192 - 64 - 7 + 8 * i);
    secret.low[i] = read(11 + 8 * i);
    secret.high[i] = read(192 - 64 - 11 + 8 * i);
  }
  return secret;
}

struct PieceWords {
  uint64_t first = 0;
  uint64_t second = 0;
};

class PieceLanes {
 public:
  CKPTFS_DEVICE PieceLanes(const PieceSecret& secret, unsigned thread)
      : secret_(secret), at_(2 * thread) {
    first_ = thread == 0   ? kPrime32C
             : thread == 1 ? kPrime64B
             : thread == 2 ? kPrime64D
                           : kPrime64E;
    second_ = thread == 0   ? kPrime64A
              : thread == 1 ? kPrime64C
              : thread == 2 ? kPrime32B
                            : kPrime32A;
  }

  // Stripe `stripe` of a block.
  CKPTFS_DEVICE void Add(unsigned stripe, const PieceWords& data) {
    Mix(data, secret_.word[stripe + at_], secret_.word[stripe + at_ + 1]);
  }
  CKPTFS_DEVICE void AddLast(const PieceWords& data) {
    Mix(data, secret_.last[at_], secret_.last[at_ + 1]);
  }
  // After a block's sixteenth stripe.
  CKPTFS_DEVICE void Scramble() {
    first_ = Scrambled(first_, secret_.word[16 + at_]);
    second_ = Scrambled(second_, secret_.word[17 + at_]);
  }
  // This thread's share of the digest's halves: their sum over the four is what Finish takes.
  CKPTFS_DEVICE uint64_t Low() const { return Fold(secret_.low[at_], secret_.low[at_ + 1]); }
  CKPTFS_DEVICE uint64_t High() const { return Fold(secret_.high[at_], secret_.high[at_ + 1]); }
  CKPTFS_DEVICE static uint64_t FinishLow(uint64_t sum, uint64_t bytes) {
    return Avalanche(sum + bytes * kPrime64A);
  }
  CKPTFS_DEVICE static uint64_t FinishHigh(uint64_t sum, uint64_t bytes) {
    return Avalanche(sum + ~(bytes * kPrime64B));
  }

 private:
  static constexpr uint64_t kPrime32A = 0x9E3779B1u, kPrime32B = 0x85EBCA77u,
                            kPrime32C = 0xC2B2AE3Du;
  static constexpr uint64_t kPrime64A = 0x9E3779B185EBCA87u, kPrime64B = 0xC2B2AE3D27D4EB4Fu,
                            kPrime64C = 0x165667B19E3779F9u, kPrime64D = 0x85EBCA77C2B2AE63u,
                            kPrime64E = 0x27D4EB2F165667C5u;

  CKPTFS_DEVICE static uint64_t Product(uint64_t word) {
    return static_cast<uint64_t>(static_cast<uint32_t>(word)) * static_cast<uint32_t>(word >> 32);
  }
  CKPTFS_DEVICE void Mix(const PieceWords& data, uint64_t key, uint64_t next_key) {
    first_ += data.second + Product(data.first ^ key);
    second_ += data.first + Product(data.second ^ next_key);
  }
  CKPTFS_DEVICE static uint64_t Scrambled(uint64_t lane, uint64_t key) {
    return (lane ^ (lane >> 47) ^ key) * kPrime32A;
  }
  CKPTFS_DEVICE uint64_t Fold(uint64_t key, uint64_t next_key) const {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(first_ ^ key) * (second_ ^ next_key);
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  CKPTFS_DEVICE static uint64_t Avalanche(uint64_t word) {
    word = (word ^ (word >> 37)) * 0x165667919E3779F9u;
    return word ^ (word >> 32);
  }

  const PieceSecret& secret_;
  const unsigned at_;  // of its first accumulator
  uint64_t first_;
  uint64_t second_;
};

// All of a piece but the sum over its threads.  words(at): the two words at byte `at` of it, little
// endian.  REQUIRES: bytes >= kShortestPiece.
template <class Words>
CKPTFS_DEVICE void AddPiece(PieceLanes& lanes, uint64_t bytes, unsigned thread,
                            const Words& words) {
  constexpr unsigned kStripes = 16, kStripe = 64;
  const uint64_t own = 16 * thread;
  const uint64_t blocks = (bytes - 1) / (kStripe * kStripes);
  for (uint64_t block = 0; block < blocks; ++block) {
    const uint64_t begin = block * (kStripe * kStripes) + own;
    PieceWords data[kStripes];
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (unsigned i = 0; i < kStripes; ++i) data[i] = words(begin + i * kStripe);
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (unsigned i = 0; i < kStripes; ++i) lanes.Add(i, data[i]);
    lanes.Scramble();
  }
  const uint64_t rest = blocks * (kStripe * kStripes);
  const auto stripes = static_cast<unsigned>((bytes - 1 - rest) / kStripe);
  for (unsigned i = 0; i < stripes; ++i) lanes.Add(i, words(rest + i * kStripe + own));
  lanes.AddLast(words(bytes - kStripe + own));
}

}  // namespace ckptfs
