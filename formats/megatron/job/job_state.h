// SPDX-License-Identifier: Apache-2.0
//
// JobState is what a job of Megatron's training says of a step beside tensors, in whatever form it
// saved them: groups of its optimizer, counts of steps, documents, degrees.
//
// The parameters of a group are not said.  A group is given the parameters that Megatron's own rule
// gives it (optimizer/__init__.py: _get_param_groups of core 0.16.1), where that leaves one way:
// experts of expert parallelism apart, and no weight decay for biases and vectors (with an argument
// for those of the norms of queries and keys).  Else groups are left out.
//
// Thread safety: pure but for what they are given.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/model/layout.h"
#include "core/state/assembler.h"
#include "core/state/state_dict.h"
#include "formats/megatron/common_state.h"

namespace ckptfs::megatron {

// True if the norms of queries and keys decay, by the job's arguments.
bool NormsDecay(const CommonState& job);

// The tensors of each group, where Megatron's rule leaves one way.  `tensors`: all that is trained.
// `norms_decay`: NormsDecay of the job.
std::optional<std::vector<std::vector<size_t>>> MembersOf(
    const std::vector<CommonGroup>& groups, const std::vector<StateDict::Tensor>& tensors,
    bool norms_decay);

// The count of an optimizer's steps as a state.
StateDict::State StepState(std::string parameter, int64_t step);

// Adds the groups of all that has a state in the dict, and the counts of their steps but for those
// parameters that have one.  `common_step`: of all parameters, where the optimizer has only that.
// A note says that a rule gave groups their parameters.
Status AddGroups(const std::vector<CommonGroup>& groups, std::optional<int64_t> common_step,
                 const CommonState& job, StepModel& header, StateDict& dict);

// Adds the entries of the state as documents "client/<key>", but for those that `is_other` names.
Status AddDocuments(const CommonState& common,
                    const std::function<bool(std::string_view key)>& is_other, StepModel& header);

// Carries the config.json that the arguments make, or says why they make none.
void CarryConfigOf(const CommonState& common, const std::vector<StateDict::Tensor>& tensors,
                   Assembler& assembler);

// The degrees of the job; nothing where they are not a layout's.
std::optional<Layout> LayoutOf(const CommonState& common);

}  // namespace ckptfs::megatron
