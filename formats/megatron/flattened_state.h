// SPDX-License-Identifier: Apache-2.0
//
// FlattenedState is a state as DistributedOptimizer of cores up to 0.14 saves it by default
// (fully_sharded_model_space; dist_checkpointing/strategies/resharding.py of core 0.14.0).  Ranks
// have equal boxes of a tensor, and data-parallel ranks ranges of a box's row-major elements:
//
//   tensor [X, Y, Z] in boxes of [x, y, z]   ->   stored [X/x, Y/y, Z/z, x y z]
//
// so that a chunk is a range of one box.
//
// Thread safety: immutable once made.
// Lifetime: the stored state must outlive it.
// Units: elements.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "formats/dcp/stored_state.h"

namespace ckptfs::megatron {

// True if a tensor of shape `of` is stored so under `stored`.
bool IsFlattened(const Shape& stored, const Shape& of);

class FlattenedState {
 public:
  // `tensor`: the stored one.  kUnsupported for chunks that are not ranges of one box each.
  // REQUIRES: IsFlattened(its shape, of).
  static Result<std::shared_ptr<const FlattenedState>> Make(const dcp::StoredState& state,
                                                            size_t tensor, const Shape& of);

  // All of it, or the layer that dimension 0 counts, under an atom without that dimension.
  // REQUIRES: boxes of one layer each, if a layer is asked for.
  Status Place(int64_t layer, Assembler& assembler, AtomIndex atom) const;
  bool HasLayers() const { return box_.front() == 1; }

 private:
  FlattenedState(const dcp::StoredState& state, size_t tensor, Shape box)
      : state_(state), tensor_(tensor), box_(std::move(box)) {}

  const dcp::StoredState& state_;
  size_t tensor_;
  Shape box_;                   // of a rank
  std::vector<size_t> chunks_;  // in the order of their boxes and ranges
};

}  // namespace ckptfs::megatron
