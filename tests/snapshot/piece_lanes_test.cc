// SPDX-License-Identifier: Apache-2.0
//
// The kernel's arithmetic, thread by thread, against libxxhash.
#include "snapshot/device/piece_lanes.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

#include "core/base/digest.h"
#include "snapshot/device/copier.h"

namespace ckptfs {
namespace {

Digest ByFourThreads(std::string_view piece) {
  static constexpr PieceSecret kSecret = MakePieceSecret();
  uint64_t low = 0, high = 0;
  for (unsigned thread = 0; thread < kPieceThreads; ++thread) {
    PieceLanes lanes(kSecret, thread);
    AddPiece(lanes, piece.size(), thread, [&](uint64_t at) {
      EXPECT_LE(at + 16, piece.size());
      PieceWords words;
      std::memcpy(&words.first, piece.data() + at, 8);
      std::memcpy(&words.second, piece.data() + at + 8, 8);
      return words;
    });
    low += lanes.Low();
    high += lanes.High();
  }
  return {PieceLanes::FinishHigh(high, piece.size()), PieceLanes::FinishLow(low, piece.size())};
}

TEST(PieceLanesTest, IsXxh3AtEveryLengthAndAlignment) {
  std::mt19937_64 random(7);
  std::string bytes(300'000, 0);
  for (char& byte : bytes) byte = static_cast<char>(random());
  for (int round = 0; round < 3000; ++round) {
    const size_t size =
        kShortestPiece + (round < 2200 ? static_cast<size_t>(round) : random() % 280'000);
    const auto piece = std::string_view(bytes).substr(random() % 17, size);
    ASSERT_EQ(ByFourThreads(piece), DigestOf(piece)) << size;
  }
}

TEST(PieceLanesTest, AShortPieceHasZerosBehindIt) {
  for (size_t size = 0; size < kShortestPiece; ++size) {
    std::string piece(size, 'x');
    const DeviceDigest digest = PieceDigestOf(std::as_bytes(std::span(piece)));
    piece.resize(kShortestPiece);
    ASSERT_EQ((Digest{digest.high, digest.low}), ByFourThreads(piece)) << size;
  }
}

}  // namespace
}  // namespace ckptfs
