// SPDX-License-Identifier: Apache-2.0
//
// ShardSet is one tensor of all ranks' files: the boxes of each copy of it.  That they are copies
// is what the mesh says (Replicate; the parts of a larger mesh, each of which has all of it), never
// that bytes are equal.  A plain tensor beside sharded ones is each rank's whole one, as torch's
// own state dicts have it.  The assembler proves that the boxes of each copy tile the tensor.
//
// Thread safety: values.
// Units: elements.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/shared_rows.h"
#include "formats/rank_shards/shard_value.h"

namespace ckptfs::rank_shards {

class ShardSet {
 public:
  // The values of ranks 0, 1, ...  kInvalid names the ranks that contradict each other.
  // REQUIRES: there is one; equal meshes are one object.
  static Result<ShardSet> Make(std::vector<ShardValue> by_rank);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  ShardValue::Form form() const { return form_; }

  // Gives an atom all copies.
  Status Place(Assembler& assembler, AtomIndex atom) const;

 private:
  using Parts = std::vector<ShardValue::Part>;
  Status TakeMeshes(std::vector<ShardValue>& by_rank);
  Status TakeBoxes(std::vector<ShardValue>& by_rank);

  DType dtype_ = DType::kF32;
  Shape shape_;
  ShardValue::Form form_ = ShardValue::Form::kPlain;
  std::vector<Parts> copies_;
};

}  // namespace ckptfs::rank_shards
