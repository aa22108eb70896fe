// SPDX-License-Identifier: Apache-2.0
//
// RankContent is model_optim_rng.pt of a view for one rank: all that common.pt of megatron/ has
// (common_file.h), and the weights of the rank's module under the names that it has of them
// (local_names.h has the way back):
//
//   model, or model0, model1 ...   of each virtual stage; layers are counted from 0
//   input_layernorm,               the norms before fused layers, where the source's job says
//   pre_mlp_layernorm                --transformer-impl local, or does not say it
//   self_attention.linear_qkv.     the same, where it says transformer_engine, or does not say it
//     layer_norm_*, mlp.linear_fc1.*
//   mlp.experts.local_experts.<E>  experts by their numbers on the rank
//   mlp.experts.linear_fc1.weight<E>  the same, where the source's job has --moe-grouped-gemm, or
//                                    does not say it
//   <linear layer>._extra_state    None
//
// A job takes the names that its modules have, and prints those that it does not have.
//
// Thread safety: pure functions.

#pragma once

#include <string_view>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs::megatron {

// kUnsupported names a parameter that no rank's module can have, or the layout that cannot be said
// so.  REQUIRES: CheckLayout and CheckNames succeed for what is shown.
Result<ArchiveContent> RankContent(const ShownState& shown, const RankCoordinate& rank,
                                   std::string_view config);

// kUnsupported for layouts of which no such file can be made.
Status CheckLegacyLayout(const ShownState& shown);

}  // namespace ckptfs::megatron
