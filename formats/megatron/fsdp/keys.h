// SPDX-License-Identifier: Apache-2.0
//
// Keys of a directory of --ckpt-format fsdp_dtensor.  Wrappers (MegatronFSDP, Float16Module) put
// "module." before a parameter's name, as many times as there are of them: the model's own
// state_dict is inside of fewer than the optimizer is.
//
//   model.module.decoder.layers.0.<rest>                            a tensor of the model
//   optimizer.state.module.module.module.<name>.exp_avg             a state of it
//   optimizer.param_to_group_meta.module.module.module.<name>.lr    its hyper-parameter
//
// A gated linear_fc1 is in two tensors in `model` and in `state`, and in one in
// `param_to_group_meta` (transformer/fsdp_dtensor_checkpoint.py: handle_swiglu_in_state_dict):
//
//   ...mlp.linear_fc1.weight_w, ...mlp.linear_fc1.weight_v          the gate, and what it gates
//
// Thread safety: pure functions.
// Lifetime: results refer to the key.

#pragma once

#include <cstdint>
#include <string_view>

namespace ckptfs::megatron {

inline constexpr std::string_view kArguments = "args";

struct FsdpKey {
  enum class Of : uint8_t {
    kModel,      // a tensor, or an object of a module
    kState,      // an optimizer's
    kGroup,      // a hyper-parameter
    kOptimizer,  // something else of the optimizer
    kOther,
  };
  Of of = Of::kOther;
  std::string_view name;  // of the parameter; of kOptimizer and kOther the whole key
  std::string_view rest;  // the kind of a state, the key of a hyper-parameter
};

FsdpKey FsdpKeyOf(std::string_view key);

// The rows of a linear_fc1 that a tensor has.
enum class FsdpHalf : uint8_t { kAll, kGate, kUp };

struct HalvedName {
  std::string_view name;  // of the parameter, without the half's ending
  FsdpHalf half = FsdpHalf::kAll;
};

HalvedName HalvedNameOf(std::string_view name);

// True of the weights and biases of a linear_fc1 that Megatron-FSDP saves in halves if it is gated:
// of a dense layer, of shared experts, and of one expert.
bool IsHalvable(std::string_view name);

}  // namespace ckptfs::megatron
