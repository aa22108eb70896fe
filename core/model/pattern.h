// SPDX-License-Identifier: Apache-2.0
//
// Pattern is UCP's language (Universal Checkpointing, section 5.3): how a
// framework spreads an atom over the ranks of the tensor- or expert-parallel
// dimension, with the padding to strip.  MakeLocal turns a pattern into what
// one rank of a degree holds.
//
// Thread safety: immutable values; the functions are pure.
// Units: elements.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/piece.h"

namespace ckptfs {

// The numbers are stored in manifests: append only.
enum class PatternKind : uint8_t {
  kUnknown = 0,    // no rule covers it: fine at degree 1, a refusal otherwise
  kUnique = 1,     // held by one rank only
  kReplicate = 2,  // whole on every rank, declared equal
  kPartial = 3,    // whole on every rank, the atom is the average
  kShard = 4,      // cut along `cuts` (V: dim 0; H: dim 1; Hy: several dims; NC: parts)
};

// One cut of a shard pattern.  The dim consists of consecutive `parts` (their
// sizes in the unpadded atom; empty: one part, the whole dim), each of which is
// split over the ranks, evenly or as `widths` say; rank r holds the r-th slice
// of every part, in order (NC: fused QKV of grouped-query attention, gate/up, fused experts).
struct Cut {
  uint32_t dim = 0;
  std::vector<uint64_t> parts = {};
  // > 0: the dim is padded at its end with zeros to a multiple of
  // pad_multiple * degree before it is cut (vocabularies).  Never at degree 1,
  // as Megatron-style code does, unless pad_always.
  uint64_t pad_multiple = 0;
  bool pad_always = false;
  // Every rank's slice of every part is a multiple of this (a head's rows):
  // a degree that would cut through a head is refused.
  uint64_t unit = 1;
  // The width of each part on each rank where the split is not even, as one source's
  // ranks were cut: row-major [part][rank], padding included (6 heads of 64 on 4
  // ranks: 128, 128, 64, 64).  Says nothing of other degrees than
  // widths.size() / parts.
  std::vector<uint64_t> widths = {};
  bool operator==(const Cut&) const = default;
};

struct Pattern {
  PatternKind kind = PatternKind::kUnknown;
  // One cut: V, H, NC.  Several (Hy): the ranks form a grid, the last cut
  // fastest, `grid[i]` ranks along cuts[i]; the product is the degree.
  std::vector<Cut> cuts = {};
  std::vector<uint64_t> grid = {};
  bool bias_scaled = false;  // stored divided by the degree (AutoTP row-parallel biases)
  bool operator==(const Pattern&) const = default;

  static Pattern Replicate() { return Pattern{PatternKind::kReplicate, {}, {}, false}; }
  static Pattern Shard(uint32_t dim, std::vector<uint64_t> parts = {}) {
    return Pattern{PatternKind::kShard, {Cut{dim, std::move(parts), 0, false, 1}}, {}, false};
  }
};

inline bool IsOneCut(const Pattern& pattern) {
  return pattern.kind == PatternKind::kShard && pattern.cuts.size() == 1;
}

// UCP's name: "unique", "replicate", "partial", "shard-v", "shard-h", "shard-hy",
// "shard-nc"; "unknown".
std::string PatternName(const Pattern& pattern);

// The local tensor of rank `rank` of `degree` for an atom of shape `atom`.  kInvalid when
// a part does not divide by the degree, parts do not sum to the dim, a dim is
// out of range, the degree differs from the grid's or the widths' (except degree
// 1), or the pattern is kUnknown and degree > 1.  A kUnique parameter is held whole; its
// shape does not tell by which rank.
// REQUIRES: rank < degree.
Result<LocalTensor> MakeLocal(const Pattern& pattern, const Shape& atom, uint64_t rank,
                              uint64_t degree);

// As MakeLocal, for a source whose local tensor has `local_rows` rows along the
// cut dim (dim 0 where nothing is cut): what a file says beats what a rule
// would compute.  More rows than the atom has are padding at the end, which
// only a cut with pad_multiple > 0 and one part may have.  Grids (Hy) have no
// such form and are refused.
Result<LocalTensor> MakeLocalWithRows(const Pattern& pattern, const Shape& atom, uint64_t rank,
                                      uint64_t degree, uint64_t local_rows);

}  // namespace ckptfs
