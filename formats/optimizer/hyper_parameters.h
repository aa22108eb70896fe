// SPDX-License-Identifier: Apache-2.0
//
// The hyper-parameters of a group and the count of its steps, as optimizers of torch (2.13) are
// given them.  A view format says where they stand.
//
// Thread safety: pure functions.

#pragma once

#include <optional>
#include <string>

#include "core/base/result.h"
#include "core/view/shown_state.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs {

// The dict that the source has of a group, without the names of its members; empty if it has none.
Result<PickleTree> RecordedHyperParameters(const Group& group);

// `param_names` as the step has it, of an optimizer that was made of named parameters (torch 2.6):
// a DCP source's own value, None of others.  Nothing if the group does not name its members.
Result<std::optional<PickleTree>> RecordedMemberNames(const Group& group);

// The dict of a group without its members: the source's values in their order, those of classes
// only if they are `trusted`; then those that torch.optim.Adam and AdamW ask for by name and
// the fused Adams of DeepSpeed and Megatron (FusedAdam, DeepSpeedCPUAdam; Apex's, Transformer
// Engine's) have no words for, since they cannot be otherwise.  These are missing for another
// optimizer, and for an Adam without bias correction, which torch does not have. REQUIRES: the
// group is recorded.
Result<PickleTree> TorchHyperParameters(const ShownState& shown, const ShownGroup& group,
                                        bool trusted);

// A number as the 0-d fp32 tensor in which torch's optimizers count their steps.
// kUnsupported: fp32 does not hold it.
Result<std::string> StepBytes(double number);

}  // namespace ckptfs
