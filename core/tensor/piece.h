// SPDX-License-Identifier: Apache-2.0
//
// A LocalTensor is what one rank holds of an atom: a dense tensor (padding
// included) and the pieces that map boxes of the atom into it.  The same form
// describes where bytes come from (a source rank) and where they go (a target
// rank): TP cuts along any dim, fused QKV and gate/up, stacked experts, vocab
// padding, transposition and pre-scaled biases are all lists of pieces.
//
//   element (atom_begin + i) of the atom   <->   element
//   local_offset + sum_d i[d] * local_strides[d]  of the row-major local tensor
//   for every index i in the box [0, shape)
//
// Elements of the local tensor that no piece touches are padding: unspecified
// in a source, zero in a target.
//
// Thread safety: immutable values.
// Units: elements.  Shapes and strides are outermost first, one per atom dim.

#pragma once

#include <cstdint>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"

namespace ckptfs {

struct Piece {
  Shape shape;                          // the box; atom rank
  std::vector<uint64_t> atom_begin;     // first index of the box in the atom
  uint64_t local_offset = 0;            // of the box's first element
  std::vector<uint64_t> local_strides;  // in the local tensor, per atom dim
  double scale = 1.0;                   // local = scale * atom (AutoTP row biases)

  bool operator==(const Piece&) const = default;
};

struct LocalTensor {
  Shape shape;  // row-major, padding included
  std::vector<Piece> pieces;

  bool operator==(const LocalTensor&) const = default;
};

// The whole atom, unpadded.
LocalTensor WholeTensor(const Shape& shape);

// A local tensor that is a run of another's flat storage with any strides
// (torch views): the storage has `storage_elements` elements, element 0 of the
// atom is at `storage_offset`.
LocalTensor StridedView(const Shape& shape, uint64_t storage_elements, uint64_t storage_offset,
                        const std::vector<uint64_t>& strides);

// Every box inside `atom`, every image inside the local tensor, scales finite
// and not zero; kInvalid names the rule.
Status ValidateLocal(const LocalTensor& local, const Shape& atom);

}  // namespace ckptfs
