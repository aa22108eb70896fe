// SPDX-License-Identifier: Apache-2.0
//
// A config.json of transformers made of the arguments of Megatron's training job, for the
// architectures whose names the table formats/dialects/mcore.toml has.  Every value of it is an
// argument's or a tensor's; where one is not said, or says a model that transformers would compute
// otherwise, there is no config, and the reason names the argument.  Ids of special tokens are
// null: no argument says them.  The vocabulary is the embedding's rows, padding included: no
// argument tells how many ids the tokenizer has.
//
// Source: megatron/training/arguments.py, core/transformer/transformer_config.py of core 0.16.1;
// configuration_*.py of transformers 5.23.
//
// Thread safety: pure.

#pragma once

#include <string>
#include <vector>

#include "core/state/state_dict.h"
#include "formats/torch/pickle_value.h"

namespace ckptfs::megatron {

struct MadeConfig {
  std::string json;  // "": none can be made
  std::string why;   // then
};

// `args`: the Namespace, or nothing.  `tensors`: those of the model, by their names.
MadeConfig ConfigOfArguments(PickleRef args, const std::vector<StateDict::Tensor>& tensors);

}  // namespace ckptfs::megatron
