// SPDX-License-Identifier: Apache-2.0
//
// ViewEntries are a step's tensors and objects as the sharded_state_dict of a GPT model of
// megatron-core asks for them (core 0.16.1: transformer_block.py, distrib_optimizer.py):
//
//   decoder.layers.<rest>            dim 0 counts the layers; of a step whose layers differ, and of
//                                    one that was saved so, decoder.layers.<N>.<rest>
//   optimizer.state.<kind>.<key>     param, exp_avg, exp_avg_sq of the same shape
//   <module>._extra_state/shard_...  what a module keeps beside its tensors: None
//
// A torch_dist source says itself which modules keep something.  Steps of other sources have an
// object for each module of either specification of the layers (local, Transformer Engine), and
// the norm before experts under the names of both: a reader takes those that it asks for.
//
// Thread safety: pure functions.
// Lifetime: refers to the step's atoms by index.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/dcp/box_index.h"

namespace ckptfs::megatron {

struct ViewRequest {
  bool optimizer = false;  // REQUIRES: all that is trained has Adam's states
  uint64_t cut_from = 0;   // bytes from which a layer's tensor is cut for the ranks
};

// A tensor is cut as the layout's tp cuts it, and between experts; part of rank N lies in file N.
// kUnsupported names the parameter that cannot be shown or the key that two would have.
// REQUIRES: CheckNames() succeeds.
Result<std::vector<dcp::BoxEntry>> EntriesOf(const ShownState& shown, const ViewRequest& request);

// The fp32 atom of a parameter that Megatron keeps beside its weight: the master, or the weight
// where there is no other.
Result<AtomIndex> MasterOf(const ShownState& shown, ParameterIndex parameter);

}  // namespace ckptfs::megatron
