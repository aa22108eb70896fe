// SPDX-License-Identifier: Apache-2.0
//
// A DeviceMesh as a pickled DTensor carries it: which rank stands where.  Each rank's file says the
// mesh and that rank's own place in it; the two must agree with the rank that the file's name says,
// so that files whose names were exchanged are noticed.
//
//   torch 2.0 to 2.9   `mesh`, an integer tensor of ranks, `_coordinate_on_dim`
//   torch 2.10 on      `_layout` (per axis: sizes and strides) over `_rank_map`, `_rank`; a part of
//                      a mesh (mesh["fsdp"]) has the whole one's map, and the rank says which part
//
// Thread safety: values; pure but for reading the file.
// Units: ranks of the job, from 0.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/result.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::rank_shards {

// More ranks than this in one save are refused.
inline constexpr uint64_t kMaxRanks = uint64_t{1} << 16;
inline constexpr size_t kMaxMeshDims = 16;

struct Mesh {
  std::vector<uint64_t> shape;  // outermost first, product = ranks.size()
  std::vector<uint64_t> ranks;  // row-major, each once
  auto operator<=>(const Mesh&) const = default;
};

struct PlacedMesh {
  std::shared_ptr<const Mesh> mesh;
  std::vector<uint64_t> coordinate;  // the place of the rank whose file it is, per dim
};

// kInvalid names the rule: a mesh that is none, or without `rank`, or that says another place for
// it.  BLOCKS: on reading a few numbers.
Result<PlacedMesh> ReadMesh(PickleRef mesh, const TorchFile& file, uint64_t rank);

}  // namespace ckptfs::rank_shards
