// SPDX-License-Identifier: Apache-2.0
//
// PlainOptimizer is what a tool loads without DeepSpeed from a step that DeepSpeed saved:
// the state_dict of a torch optimizer, which Trainer calls optimizer.pt and accelerate
// optimizer.bin,
//
//   {'state': {0: {'step': ..., 'exp_avg': ..., ...}, 1: ...},
//    'param_groups': [{'lr': ..., ..., 'params': [0, 1, ...]}, ...]}
//
// Its states are numbered, group by group in the order in which the optimizer was given
// its parameters, and torch compares neither names nor shapes when it loads them.  DeepSpeed
// (0.19.7) writes down the members of each group as they lie in its flat partitions
// (engine._get_zero_param_shapes); without ZeRO torch's own numbers are in the file.  This is
// the order of the groups, except where round_robin_gradients deals the parameters out anew,
// where experts are taken into groups of their own, and where a rank has only a part of the
// model: there it is refused.
//
// Thread safety: pure functions.
// Lifetime: the result refers to the step's atoms by index.

#pragma once

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs {

// kUnsupported says why it is not certain whose the states are, or what has no place in
// such a file.
Result<ArchiveContent> PlainOptimizer(const ShownState& shown);

}  // namespace ckptfs
