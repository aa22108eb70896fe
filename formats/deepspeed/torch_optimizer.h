// SPDX-License-Identifier: Apache-2.0
//
// TorchOptimizer is what a torch optimizer's state_dict says: groups of members, and states by
// the members' numbers.  It lies in a model states file of DeepSpeed without ZeRO, in
// Trainer's optimizer.pt, accelerate's optimizer.bin and Lightning's own file.  FSDP's full state
// has names for keys; these are numbered here in the order of the groups.
//
// Thread safety: values; pure but for reading the file.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/left_out.h"
#include "core/state/state_dict.h"
#include "formats/deepspeed/optimizer_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {

struct TorchOptimizer {
  std::vector<HyperGroup> groups;  // members: numbers of states
  std::vector<std::vector<std::string>>
      names;  // per group, of its members as the file says; or empty
  std::map<int64_t, PartitionStates> states;
  std::map<int64_t, PickleRef> values;  // of the states, in the file's tree, which must be there
  std::vector<LeftOut> left_out;        // states of no member
};

// kInvalid names the key.  BLOCKS: on reading numbers that are tensors.
Result<TorchOptimizer> ReadTorchOptimizer(PickleRef dict, const TorchFile& file, BlobIndex blob);

// Adds the states of one member to a dict, with whose they are as `like` has it; `holder` has them.
void AddTo(const PartitionStates& states, const StateDict::State& like, Holder holder,
           StateDict& dict);
// Adds its groups, members and states to a dict, as those of one of its optimizers.  It must
// outlive the dict.
void AddTo(const TorchOptimizer& torch, size_t optimizer, StateDict& dict);

}  // namespace ckptfs::deepspeed
