// SPDX-License-Identifier: Apache-2.0
//
// LocalNames translates the names that a rank's module has of its tensors to those that
// dist_checkpointing gives them (sharded_state_dict of core 0.16.1), which all that reads steps of
// Megatron knows: layers have the model's numbers, experts of a layer are one tensor.
//
//   decoder.layers.<local>.<rest>                     decoder.layers.<N>.<rest>
//   input_layernorm, pre_mlp_layernorm of the local   self_attention.linear_qkv.layer_norm_*,
//     specification of layers                         mlp.linear_fc1.layer_norm_*
//   mlp.experts.local_experts.<E>.linear_fc1.weight   mlp.experts.experts.linear_fc1.weight
//   mlp.experts.linear_fc1.weight<E>                  the same (TEGroupedMLP)
//   mlp.experts.weight1, weight2                      the same of linear_fc1, linear_fc2: all local
//                                                     experts, each transposed (GroupedMLP)
//
// Thread safety: values; pure functions.

#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "formats/megatron/legacy/rank_model.h"

namespace ckptfs::megatron {

struct LocalName {
  enum class Form : uint8_t {
    kPlain,    // not of an expert
    kExpert,   // of one expert
    kGrouped,  // of all local experts, each transposed
  };
  std::string name;
  Form form = Form::kPlain;
  uint32_t expert = 0;  // of the rank's, of kExpert
  bool second = false;  // of linear_fc2
  bool bias = false;
};

class LocalNames {
 public:
  // `first_layer`: the model's number of the chunk's layer 0.  `chunk` is not kept.
  LocalNames(const RankChunk& chunk, uint64_t first_layer);
  // The same of a module's tensors by their names alone.
  LocalNames(std::span<const std::string_view> tensors, uint64_t first_layer);

  LocalName Of(std::string_view name) const;

 private:
  uint64_t first_layer_;
  std::set<uint64_t> local_;  // layers (of the chunk's) of the local specification
};

}  // namespace ckptfs::megatron
