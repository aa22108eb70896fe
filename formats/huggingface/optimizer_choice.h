// SPDX-License-Identifier: Apache-2.0
//
// ChooseOptimizer says which optimizer in a torch file trains the step's model: the only one
// there, unless the model is an average, or a second dict has the same parameters.
//
// Thread safety: pure.
// Lifetime: the dict borrows the file's tree.

#pragma once

#include <string>
#include <vector>

#include "core/model/left_out.h"
#include "formats/huggingface/weights_file.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::huggingface {

struct OptimizerChoice {
  PickleRef dict;                 // `state` and `param_groups`; empty if none is taken
  std::string key;                // where that stands in its file
  std::vector<LeftOut> left_out;  // the optimizers that are not
};

// `file`: the name of the optimizer's, for messages.  `weights`: what was read of the same file;
// null where the weights lie in others.
OptimizerChoice ChooseOptimizer(PickleRef root, const std::string& file,
                                const WeightsFile* weights);

}  // namespace ckptfs::huggingface
