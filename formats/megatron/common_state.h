// SPDX-License-Identifier: Apache-2.0
//
// CommonState is the part of a torch_dist checkpoint that no rank cuts: arguments of the job,
// counters, the schedule, and the hyper-parameters of the optimizer's groups.  Cores up to 0.18
// write it as common.pt, later ones as the object common_state/shard_0_1, a list of one dict.
//
// Pickles are parsed as data: argparse's Namespace and Megatron's enums are never made.
//
// Thread safety: immutable once read.

#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/family_variables.h"
#include "core/state/source.h"
#include "formats/dcp/stored_state.h"
#include "formats/torch/pickle_value.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::megatron {

inline constexpr std::string_view kCommonFile = "common.pt";

// A group of an optimizer's parameters; it does not say which these are.
struct CommonGroup {
  PickleRef dict;
  bool experts = false;  // is_expert_parallel
  bool decays = true;    // wd_mult is not 0
  std::optional<int64_t> step;
};

// The groups of an optimizer whose dict has param_groups.
std::vector<CommonGroup> GroupsOf(PickleRef optimizer);
// A group's dict without its members, as a pickle.
Result<std::string> HyperParametersOf(PickleRef group);

class CommonState {
 public:
  // kInvalid if neither form is there, or the one that is there is not a dict.
  // BLOCKS: on reading it.
  static Result<CommonState> Read(const StepCandidate& step, dcp::StoredState& state,
                                  Assembler& assembler);
  // Of a file of one rank (the legacy form), whose root is such a dict and the rank's model beside.
  static Result<CommonState> Of(TorchFile file, BlobIndex blob);
  // The arguments alone, which are the file's root: all else is elsewhere.  kInvalid if the root
  // is not a Namespace or a dict.
  static Result<CommonState> OfArguments(TorchFile file, BlobIndex blob);

  // The dict; nothing of arguments alone.  Its lifetime is this object's.
  PickleRef root() const;
  // The job's arguments, a Namespace; nothing where there are none.
  PickleRef args() const;
  const TorchFile& file() const { return file_; }
  BlobIndex blob() const { return blob_; }

  // Integers and truth values of the job's arguments.
  FamilyVariables Arguments() const;
  std::optional<int64_t> Argument(std::string_view name) const;
  // True of an argument that is True.
  bool Flag(std::string_view name) const;
  // The argument as it is; nothing where there is none.
  PickleRef ArgumentOf(std::string_view name) const;
  std::optional<uint64_t> Iteration() const;

  // The groups of all optimizers of a chain; empty where there is none.
  std::vector<CommonGroup> Groups() const;
  // Counts the steps of all parameters, where the optimizer itself does not (`common_step`).
  std::optional<int64_t> CommonStep() const;
  // How the optimizer's states are cut (`distrib_optim_sharding_type`); "" where nothing says it.
  std::string OptimizerForm() const;

 private:
  // Where the file has the dict.
  enum class Place : uint8_t { kRoot, kOnlyOfList, kNowhere };

  TorchFile file_;
  BlobIndex blob_{};
  Place place_ = Place::kRoot;
};

}  // namespace ckptfs::megatron
