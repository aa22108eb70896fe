// SPDX-License-Identifier: Apache-2.0
//
// TrainerRule is how transformers.Trainer gives a model to the optimizer that it makes itself
// (create_optimizer and get_decay_parameter_names, transformers 5.23): two groups, first the
// parameters that decay, then the others, each in the order of model.named_parameters(); frozen
// ones are in neither.  Others are biases, norms by their names, and what is in an nn.LayerNorm.
// Older versions tell norms by their classes alone, so a name of a norm may be in either.
//
// A Trainer may also be given an optimizer, which knows no rule, and may have Trainer's
// hyper-parameters.  So the rule is believed only where training_args.bin beside the step says what
// the groups have: their weight decays, the learning rate that they began with, betas and
// epsilon; and where they have a setting that Trainer's optimizers have and torch's do not by
// themselves (`fused` of adamw_torch_fused).  adamw_torch has none: a script's own looks like it.
//
// Thread safety: pure but for reading the file.

#pragma once

#include <optional>
#include <span>
#include <string>

#include "core/state/ownership.h"
#include "core/state/source.h"

namespace ckptfs {

// `hyper_parameters`: of each group, as the pickle of a dict.  `parameters`: in the model's order.
// Nothing where Trainer did not make the groups, or nothing tells.  BLOCKS: on reading.
std::optional<ToolRule> TrainerRule(const StepCandidate& step,
                                    std::span<const std::string> hyper_parameters,
                                    std::span<const OwnableParameter> parameters);

}  // namespace ckptfs
