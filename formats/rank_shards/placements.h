// SPDX-License-Identifier: Apache-2.0
//
// Placements say how the dims of a device mesh divide a DTensor, as its pickle has them
// (torch 2.13, torch/distributed/tensor/placement_types.py):
//
//   Replicate()              each place of this mesh dim has all of it
//   Shard(dim)               torch.chunk: ceil(n / places) each, the last ones fewer or none
//   _StridedShard(dim, sf)   the same, but after the mesh dims to its right have cut the dim into
//                            sf parts: FSDP2 over tensor parallelism cuts each rank's part again
//
// Mesh dims that cut one tensor dim do so from left to right; a _StridedShard stands behind those
// to its right whose sizes multiply to its factor.  Partial and others are refused by name.
//
// Thread safety: values and pure functions.
// Units: elements.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/tensor/shape.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::rank_shards {

struct Placement {
  std::optional<uint64_t> dim;  // of the tensor; nothing: replicated
  uint64_t factor = 1;          // parts that it finds, of a _StridedShard
  bool operator==(const Placement&) const = default;
};

// Reads those of a DTensorSpec, one per mesh dim.  kInvalid names what is not understood.
Result<std::vector<Placement>> ReadPlacements(PickleRef spec);

// Tensor dims, each with the mesh dims that cut it, in the order in which they do.
using CutOrder = std::vector<std::vector<size_t>>;
// kInvalid for a dim that the tensor does not have, and a factor that fits no mesh dims.
Result<CutOrder> OrderOfCuts(const std::vector<Placement>& placements, size_t dims,
                             const std::vector<uint64_t>& mesh);
// kInvalid unless the order that a spec says beside its placements (torch 2.10) is this one.
Status CheckOrder(PickleRef spec, const CutOrder& order);

struct ShardBox {
  std::vector<uint64_t> begin;
  Shape shape;
};
// The box of a tensor that a place of the mesh holds.  A dim of which nothing is left begins at its
// end.
ShardBox BoxAt(const Shape& whole, const CutOrder& order, const std::vector<uint64_t>& mesh,
               const std::vector<uint64_t>& coordinate);

}  // namespace ckptfs::rank_shards
