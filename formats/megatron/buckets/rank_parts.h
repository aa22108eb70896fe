// SPDX-License-Identifier: Apache-2.0
//
// RankParts says what each rank of a model-parallel job held of a tensor of torch_dist.  Every
// rank saves its own tensor as chunks, so the chunks tell:
//
//   one chunk for a layer (and expert)     every tensor-parallel rank has all of it
//   T of them, along one dimension         rank r has the r-th
//   k T of them, along the first           k parts that are cut each: rank r has the r-th of each,
//                                          one after the other ([gate; up] of SwiGLU)
//
// Source: mapping.py and transformer/mlp.py (apply_swiglu_sharded_factory) of core 0.16.1.
//
// Thread safety: pure functions; values.
// Units: elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/tensor/shape.h"
#include "formats/dcp/metadata.h"

namespace ckptfs::megatron {

// RankPart is a rank's part of one layer of a tensor, or of one expert of it: row-major boxes, one
// after the other.
struct RankPart {
  struct Box {
    size_t chunk = 0;  // of the tensor's
    Shape begin;       // without the dimension that counts the layers
    Shape shape;
  };
  std::optional<uint32_t> tp;  // the tensor-parallel rank; nothing: all have it
  std::optional<uint32_t> expert;
  std::vector<Box> boxes;
  uint64_t elements = 0;
};

struct PartsOf {
  bool stacked = false;  // dimension 0 counts the layers
  bool experts = false;  // the next one counts the experts
  uint32_t tp = 1;       // ranks that cut it
};

// The parts of each layer, in the order of their chunks.  A layer is empty whose chunks are not
// those of such ranks.  The time that it takes depends on the number of chunks alone.
// REQUIRES: a stacked tensor has a dimension that counts its layers.
std::vector<std::vector<RankPart>> RankPartsOf(const dcp::DcpMetadata& metadata,
                                               const dcp::TensorEntry& tensor, const PartsOf& how);

}  // namespace ckptfs::megatron
