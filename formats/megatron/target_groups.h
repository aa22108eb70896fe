// SPDX-License-Identifier: Apache-2.0
//
// TargetGroups are the groups that Megatron's own rule makes of a step's parameters, with the
// hyper-parameters that the step has of them.  A group of Megatron's has one dict; parameters of
// one group that the step has in several must agree in all of it.
//
// The dict of a Megatron step is carried as it is.  Of another optimizer's, Megatron's Adams are
// given what they have words for (lr, betas, eps, weight_decay), and the marks by which Megatron
// finds a group (optimizer.py: param_group_identifier_keys).
//
// Thread safety: immutable values; pure functions.
// Lifetime: independent of the step.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/torch/pickle_writer.h"

namespace ckptfs::megatron {

struct TargetGroup {
  bool experts = false;  // of the optimizer that expert parallelism has apart
  bool decays = true;
  std::vector<std::pair<std::string, std::string>> values;  // a key, and the pickle of its value
};

struct TargetGroups {
  std::vector<TargetGroup> groups;  // dense ones first; each optimizer has one that decays, and one
                                    // that does not
  bool experts_apart = false;       // there are two optimizers
  std::vector<std::string> notes;   // what a run computes otherwise than the source did
};

// Nothing for a step that does not have an optimizer's states.  The error is the reason why
// Megatron's optimizer cannot have them: a state that it does not know, or that one parameter
// lacks, hyper-parameters that are not known or differ inside a group, counts that differ.
Result<std::optional<TargetGroups>> TargetGroupsOf(const ShownState& shown);

// {"optimizer": {"param_groups": [...]}, "param_state_sharding_type": ...}, by the number of the
// optimizer where there are two.
Result<NodeId> PrintOptimizer(const TargetGroups& groups, PickleBuilder& builder);

}  // namespace ckptfs::megatron
