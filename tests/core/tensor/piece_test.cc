// SPDX-License-Identifier: Apache-2.0

#include "core/tensor/piece.h"

#include <gtest/gtest.h>

#include <limits>

namespace ckptfs {
namespace {

const Shape kAtom = {4, 6};

LocalTensor OnePiece(Piece piece, Shape shape) { return LocalTensor{std::move(shape), {piece}}; }

TEST(Piece, WholeAndStridedTensorsAreValid) {
  EXPECT_TRUE(ValidateLocal(WholeTensor(kAtom), kAtom));
  EXPECT_TRUE(ValidateLocal(WholeTensor({}), {}));
  EXPECT_TRUE(ValidateLocal(WholeTensor({0, 3}), {0, 3}));
  EXPECT_TRUE(ValidateLocal(StridedView(kAtom, 24, 0, {1, 4}), kAtom));
  EXPECT_FALSE(ValidateLocal(StridedView(kAtom, 24, 1, {1, 4}), kAtom));
}

TEST(Piece, RefusesWhatLeavesTheAtomOrTheLocalTensor) {
  const Piece good{{2, 3}, {2, 3}, 0, {3, 1}, 1.0};
  EXPECT_TRUE(ValidateLocal(OnePiece(good, {2, 3}), kAtom));
  Piece piece = good;
  piece.atom_begin = {3, 3};
  EXPECT_FALSE(ValidateLocal(OnePiece(piece, {2, 3}), kAtom));
  piece = good;
  piece.atom_begin = {std::numeric_limits<uint64_t>::max(), 0};
  EXPECT_FALSE(ValidateLocal(OnePiece(piece, {2, 3}), kAtom));
  EXPECT_FALSE(ValidateLocal(OnePiece(good, {1, 3}), kAtom));
  piece = good;
  piece.local_strides = {std::numeric_limits<uint64_t>::max() / 2 + 1, 1};
  EXPECT_FALSE(ValidateLocal(OnePiece(piece, {2, 3}), kAtom));
  piece = good;
  piece.shape = {2};
  EXPECT_FALSE(ValidateLocal(OnePiece(piece, {2, 3}), kAtom));
}

TEST(Piece, RefusesBadScales) {
  for (double scale :
       {0.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_FALSE(ValidateLocal(OnePiece({{4, 6}, {0, 0}, 0, {6, 1}, scale}, {4, 6}), kAtom));
  }
}

}  // namespace
}  // namespace ckptfs
