// SPDX-License-Identifier: Apache-2.0
//
// Reader makes a step of a torch_dist directory of megatron-core: weights under the module's names,
// one tensor a layer, and the optimizer's masters and moments where they are stored by tensor
// (fully_reshardable, and optimizers that are not distributed).  Experts of a layer stay one
// tensor, as they are stored.  What is stored by buckets of ranks is left out alone.
//
// The parameters of a group are not in the directory.  A group is given the parameters that
// Megatron's own rule gives it (optimizer/__init__.py: _get_param_groups of core 0.16.1), where
// that leaves one way: experts of expert parallelism apart, and no weight decay for biases and
// vectors.  Else groups are left out.
//
// Thread safety: one reader per step.
// Lifetime: the candidate and the options must outlive it.

#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/dcp/stored_state.h"
#include "formats/megatron/common_state.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {

class Reader {
 public:
  Reader(const StepCandidate& candidate, const SourceOptions& options)
      : candidate_(candidate), options_(options) {}

  Result<StepModel> Read() &&;

 private:
  // A stored tensor and one of its layers; -1: all of it.
  struct Slice {
    size_t tensor = 0;
    int64_t layer = -1;
  };

  Status AddWeights(const dcp::StoredState& state, const CommonState& common);
  Status CheckLayers(const dcp::StoredState& state, const CommonState& common) const;
  PlaceParts PlaceOf(const dcp::StoredState& state, Slice slice) const;
  void AddStates(const dcp::StoredState& state);
  void AddState(const dcp::StoredState& state, size_t tensor, const OptimizerKey& key);
  void LeaveOutBuckets(const dcp::StoredState& state, const CommonState& common);
  Status AddGroups(const CommonState& common);
  void AddSteps(const CommonState& common, const std::vector<CommonGroup>& groups,
                const std::vector<std::vector<size_t>>& members);
  void AddStep(size_t tensor, int64_t step);
  Status AddDocuments(const CommonState& common);
  void CarryConfigOf(const CommonState& common);
  void LeaveOutObjects(const dcp::StoredState& state);
  void FillHeader(const CommonState& common, std::optional<uint64_t> steps);

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  Assembler assembler_;
  StateDict dict_;
  std::set<std::pair<std::string, std::string>> states_;  // kind, stored key of the tensor
  std::vector<Slice> slices_;                             // by tensor of the dict
  std::map<std::string, std::vector<size_t>, std::less<>>
      made_;  // by stored key: of the dict, by layer
};

}  // namespace ckptfs::megatron
