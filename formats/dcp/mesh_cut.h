// SPDX-License-Identifier: Apache-2.0
//
// MeshCut is how the ranks of a mesh divide a tensor: into the boxes that
// DTensor's compute_local_shape_and_global_offset gives them (torch 2.13,
// torch/distributed/tensor/_utils.py).
//
//   FSDP2              dim 0 by torch.chunk over the shards: ceil(n / shards) rows
//                      each, the last ones fewer or none
//   FSDP2 x TP         first along the tensor-parallel dim over tp, then dim 0 of
//                      that part over the shards (_StridedShard where both are
//                      dim 0, which leaves every rank one run of rows)
//   HSDP               as FSDP2: each replica reads the same boxes
//
// Rank shard * tp + tp_rank holds a box; of a tensor that tensor parallelism does
// not cut, the ranks of tp_rank 0 do.  Boxes without elements are nobody's.
//
// Thread safety: immutable values; all methods are pure and take constant time.
// Units: elements.

#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/tensor/shape.h"

namespace ckptfs::dcp {

// torch.chunk of [0, size) into `parts`.
struct TorchChunks {
  TorchChunks(uint64_t size, uint64_t parts);

  uint64_t begin(uint64_t i) const { return i * step; }
  uint64_t length(uint64_t i) const { return i + 1 < count ? step : size - i * step; }

  uint64_t size = 0;
  uint64_t step = 0;   // of all but the last
  uint64_t count = 0;  // boxes that are not empty
};

struct Mesh {
  uint64_t tp = 1;
  uint64_t shards = 1;
  uint64_t ranks() const { return tp * shards; }
  bool operator==(const Mesh&) const = default;
};

class MeshCut {
 public:
  // One box on rank 0.
  static MeshCut Whole(const Shape& shape) { return MeshCut(shape, std::nullopt, Mesh{}); }
  // REQUIRES: tp_dim is a dim of the shape, which has at least one.
  MeshCut(const Shape& shape, std::optional<uint32_t> tp_dim, const Mesh& mesh);

  struct Box {
    Shape begin;
    Shape shape;
    uint64_t rank = 0;
  };

  // Boxes, ordered by tp_rank, then shard.
  uint64_t count() const { return (tp_parts_.count - 1) * full_rows_.count + last_rows_.count; }
  // REQUIRES: i < count().
  Box At(uint64_t i) const;
  // The box of a rank, if it has one.
  std::optional<uint64_t> IndexOf(uint64_t rank) const;

  // Boxes of one kind have one shape: whether they are the last along each cut
  // decides.
  static constexpr size_t kKinds = 4;
  uint32_t KindOf(uint64_t i) const;
  // A box of each kind, if there is any.
  std::array<std::optional<uint64_t>, kKinds> Samples() const;

 private:
  struct Place {
    uint64_t tp_rank;
    uint64_t shard;
  };
  Place PlaceOf(uint64_t i) const;
  const TorchChunks& RowsOf(uint64_t tp_rank) const {
    return tp_rank + 1 < tp_parts_.count ? full_rows_ : last_rows_;
  }

  Shape shape_;
  std::optional<uint32_t> tp_dim_;
  uint64_t tp_ = 1;        // of the mesh, for numbering ranks
  TorchChunks tp_parts_;   // along tp_dim; else one
  TorchChunks full_rows_;  // dim 0 of every tensor-parallel part but the last
  TorchChunks last_rows_;
};

}  // namespace ckptfs::dcp
