// SPDX-License-Identifier: Apache-2.0
//
// The rule by which Megatron gives parameters to the groups of its optimizer (core 0.16.1:
// optimizer/__init__.py, _get_param_groups and get_standard_config_overrides): experts of expert
// parallelism have an optimizer of their own, and biases and vectors do not decay; with
// apply_wd_to_qk_layernorm those of the norms of queries and keys do.
//
// Thread safety: pure functions.
// Units: shapes are elements of one layer's tensor, as the module has it.

#pragma once

#include <string_view>

#include "core/tensor/shape.h"

namespace ckptfs::megatron {

inline bool IsExperts(std::string_view name) {
  return name.find(".mlp.experts.") != std::string_view::npos;
}

// OptimizerConfig.apply_wd_to_qk_layernorm, an argument of the job.
inline constexpr std::string_view kDecayOfNorms = "apply_wd_to_qk_layernorm";

inline bool Decays(std::string_view name, const Shape& shape, bool norms_decay = false) {
  const bool norm = name.find("q_layernorm.") != std::string_view::npos ||
                    name.find("k_layernorm.") != std::string_view::npos;
  return (shape.size() != 1 && !name.ends_with(".bias")) || (norms_decay && norm);
}

}  // namespace ckptfs::megatron
