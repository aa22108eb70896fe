// SPDX-License-Identifier: Apache-2.0
//
// The keys under which megatron-core's dist_checkpointing (torch_dist) saves, as of core 0.11 to
// 0.20 (dist_checkpointing/mapping.py, transformer_block.py, optimizer/distrib_optimizer.py):
//
//   decoder.layers.<rest>             a tensor whose dim 0 counts the layers
//   decoder.layers.<N>.<rest>         a tensor of one layer (models whose layers differ)
//   optimizer.state.<kind>.<key>      a state of the tensor of that key; the master's kind is
//   param,
//                                     or fp32_param
//   chained_<N>.optimizer...          the same, of one optimizer of several
//   optimizer.distributed...          buckets of ranks (dp_reshardable and older forms)
//   <key>/shard_<offset>_<shape>      an object; common_state/shard_0_1 is what common.pt was
//
// Thread safety: pure functions.
// Lifetime: results refer to the key.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/tensor/shape.h"

namespace ckptfs::megatron {

// A tensor of all layers: the name of layer N is before + N + "." + after.
struct StackedName {
  std::string_view before;  // "decoder.layers."
  std::string_view after;   // "mlp.linear_fc1.weight"

  std::string OfLayer(uint64_t layer) const;
};

// Nothing for a tensor of one layer, or of none.
std::optional<StackedName> StackedNameOf(std::string_view key);

// A tensor of one layer: "decoder.layers." 3 "mlp.linear_fc1.weight".
struct LayeredName {
  std::string_view before;
  uint64_t layer = 0;
  std::string_view after;
};

// Nothing for a tensor of all layers, or of none.
std::optional<LayeredName> LayeredNameOf(std::string_view name);

// A key of an optimizer.
struct OptimizerKey {
  std::string_view chain;   // "chained_0."; "" of the only one
  std::string_view kind;    // "exp_avg"; "" for what is not a state of one tensor
  std::string_view tensor;  // the key of the tensor that it is a state of
};

// Nothing for a key of something else.
std::optional<OptimizerKey> OptimizerKeyOf(std::string_view key);

// The key of an object without the place of its part: "rng_state".
std::string_view ObjectName(std::string_view key);

// Returns the place that the key of an object names: "2.0_4.4", part (2, 0) of 4 x 4.
std::string_view ObjectPlace(std::string_view key);
// The places of all parts of a grid, in row-major order.
std::vector<std::string> PlacesOf(const Shape& grid);

// The order in which a module has its parameters, as far as names tell: a directory has none.
// `layer`: -1 of none.
using ModuleOrder = std::tuple<int, int64_t, int, std::string_view>;
ModuleOrder ModuleOrderOf(std::string_view name, int64_t layer);

// A module keeps an object of this name beside its tensors.
inline constexpr std::string_view kExtraState = "_extra_state";

inline constexpr std::string_view kCommonObject = "common_state/shard_0_1";

}  // namespace ckptfs::megatron
