// SPDX-License-Identifier: Apache-2.0
//
// JudgeTiling tells whether boxes tile an atom: each element lies in one box only.  The time is
// linear in the boxes, but for a sort, whatever form they have: a file says how many there are
// and where, and may have been made to take long.
//
// A few boxes, and those that a sweep along one dimension tells apart, are compared with each
// other.  For all others each elementary interval of a dimension gets a random number of a field
// of 2^61 - 1 elements, and a box the product of its intervals' sums.  The boxes' numbers sum up
// to the atom's if they tile it.  If they do not, the difference is a polynomial of the random
// numbers which is not zero and whose degree is the rank, so that it vanishes with probability
// rank / 2^61 (Schwartz, Zippel); two independent sets of numbers are used: less than 2^-110.
//
// Thread safety: pure functions.
// Units: elements of the atom; boxes are half-open.

#pragma once

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "core/tensor/piece.h"

namespace ckptfs {

// A piece's box that has elements, of the local tensor of that number.
struct LocalBox {
  const Piece* piece = nullptr;
  size_t local = 0;
};

enum class Tiling {
  kTiles,     // proven, with certainty or as above
  kOverlaps,  // two boxes share an element
  kNot,       // they overlap or leave a gap
  kDisjoint,  // no two share an element; whether they leave a gap their volume tells
};

struct TilingReport {
  Tiling tiling = Tiling::kNot;
  std::pair<LocalBox, LocalBox> overlap = {};  // of kOverlaps
};

// REQUIRES: every box has the atom's rank and lies inside it.
TilingReport JudgeTiling(std::vector<LocalBox> boxes, const Shape& atom);

}  // namespace ckptfs
