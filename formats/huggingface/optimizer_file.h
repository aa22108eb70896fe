// SPDX-License-Identifier: Apache-2.0
//
// What a torch optimizer's state_dict says beside whole weights: Trainer's
// optimizer.pt, accelerate's optimizer.bin, the one in Lightning's own file.  Its
// states are numbered, group by group in the order in which the optimizer was given
// its parameters; whose they are is said only by optimizers that were given names, and
// by FSDP's full state, whose keys are names.
//
// Elsewhere names are found, never guessed: in a known order of the model's
// parameters every group has them in that order (MatchStates); without one a state
// is that of the only parameter of its shape.  Either way there must be exactly one way.
//
// Thread safety: values; pure but for reading the file.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "formats/deepspeed/model_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {

struct OptimizerFile {
  std::vector<deepspeed::HyperGroup> groups;    // members: numbers of states
  std::vector<std::vector<std::string>> names;  // per group, as the file says; else empty
  std::map<int64_t, deepspeed::PartitionStates> states;
};

// The name of the optimizer's file among those of a directory; empty if there is none,
// or there are several optimizers or models, of which nothing tells what it trains.
std::string OptimizerFileAmong(const std::vector<std::string>& names);
bool IsOptimizerFile(std::string_view name);

// The optimizer's dict in a file of one, or in Lightning's (of a single optimizer).
PickleRef OptimizerDictOf(PickleRef root);

// kInvalid names the key.  BLOCKS: on reading numbers that are tensors.
Result<OptimizerFile> ReadOptimizerFile(PickleRef dict, const TorchFile& file, BlobIndex blob);

// Whose order parameters are in: nobody's, the model's, or the one that a user gives.
enum class ParameterOrder : uint8_t { kUnknown, kModel, kGiven };

// Per group the names of its members, among `parameters`.  kUnsupported says why they are
// not certain.
Result<std::vector<std::vector<std::string>>> NamesOfMembers(
    const OptimizerFile& optimizer, const std::vector<deepspeed::NamedShape>& parameters,
    ParameterOrder order);

}  // namespace ckptfs::huggingface
