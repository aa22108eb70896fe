// SPDX-License-Identifier: Apache-2.0
//
// SharedRows collects the boxes of one atom that lie densely in files, and gives those that
// continue each other along dimension 0 one local tensor, of which each is a flat range:
// what ranks of FSDP2 hold takes a manifest as little as ZeRO's partitions do.
//
//   boxes [r0, r1) x C and [r1, r2) x C    ->   local tensor [r0, r2) x C, two fragments
//
// where C is the same box of the other dimensions, that of a tensor-parallel rank for
// example.  If the boxes are runs that make up the row-major atom, the local tensor is the
// whole atom.  Boxes that overlap stay in local tensors of their own, and gaps stay gaps: the
// coverage proof finds both.  The result does not depend on the order of Add.
//
// Thread safety: one thread.
// Units: elements; offsets are bytes of the blob.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/state/assembler.h"
#include "core/state/state_part.h"

namespace ckptfs {

// A box of an atom whose elements lie in a blob row by row, with nothing between them.
struct DenseBox {
  std::vector<uint64_t> begin;  // in the atom; one number per dimension
  Shape shape;
  BlobIndex blob{};
  uint64_t offset = 0;  // of its first element
  DType dtype = DType::kF32;
};

class SharedRows {
 public:
  explicit SharedRows(Shape atom) : atom_(std::move(atom)) {}

  // REQUIRES: the box lies inside the atom.  One without elements is ignored.
  void Add(DenseBox box);
  // The rest of the atom's copy.
  enum class Beside {
    kNothing,  // runs that leave gaps or overlap are ranges of the whole atom, too: the proof
               // then names the elements, and the files beside them
    kOthers,   // local tensors of their own
  };
  // Hands all that was added to the assembler; an atom without elements gets a local tensor
  // without fragments.
  void Place(Assembler& assembler, AtomIndex atom, uint32_t copy, Beside beside) &&;

 private:
  bool PlaceRuns(Assembler& assembler, AtomIndex atom, uint32_t copy, Beside beside) const;

  Shape atom_;
  std::vector<DenseBox> boxes_;
};

// The boxes of a rank's tensor, which begins at `offset` of `blob`, each dense by itself;
// padding is left out.  Nothing if a box is not dense there, or the tensor is a flat range.
std::optional<std::vector<DenseBox>> DenseBoxesOf(const StatePart& part, const Shape& stored,
                                                  const Fragment& tensor);

}  // namespace ckptfs
