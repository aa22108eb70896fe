// SPDX-License-Identifier: Apache-2.0
//
// TorchOptimizer is what a torch optimizer's state_dict says: groups of members, and states by
// the members' numbers.  It lies in a model states file of DeepSpeed without ZeRO, in
// Trainer's optimizer.pt, accelerate's optimizer.bin and Lightning's own file.  FSDP's full state
// has names for keys; these are numbered here in the order of the groups.
//
// OwnMembers says whose they are (core/state/ownership.h), and what is left out.
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
#include "core/state/ownership.h"
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

// Returns what is known of the members, by group.
std::vector<std::vector<OptimizerMember>> MembersOf(const TorchOptimizer& optimizer);

// The members of a group whose owners are known: numbers within the group, and parameters of
// the question.
struct OwnedGroup {
  std::vector<size_t> members;
  std::vector<size_t> parameters;
};
struct OwnedMembers {
  std::optional<std::vector<OwnedGroup>> groups;  // nothing: the optimizer is left out
  std::vector<LeftOut> left_out;
};

// `where`: the file, for messages.  Errors are those of the question's `masters`.
Result<OwnedMembers> OwnMembers(const OwnershipQuestion& question, const std::string& where);

// "the optimizer in FILE", all of it.
LeftOut WholeOptimizer(const std::string& where, std::string why, std::string remedy);

}  // namespace ckptfs::deepspeed
