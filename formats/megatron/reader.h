// SPDX-License-Identifier: Apache-2.0
//
// Reader makes a step of a torch_dist directory of megatron-core: weights under the module's names,
// one tensor a layer, and the optimizer's masters and moments: as they are stored by tensor
// (fully_reshardable, and optimizers that are not distributed), or out of buckets of ranks where it
// is proved whose they are (dp_reshardable; buckets/bucket_states.h).  Experts of a layer stay one
// tensor, as they are stored.
//
// The parameters of a group are not in the directory: job/job_state.h gives it some.
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
#include "formats/megatron/buckets/bucket_states.h"
#include "formats/megatron/common_state.h"
#include "formats/megatron/dist_keys.h"

namespace ckptfs::megatron {

class Reader {
 public:
  Reader(const StepCandidate& candidate, const SourceOptions& options)
      : candidate_(candidate), options_(options) {}

  Result<StepModel> Read() &&;

 private:
  using Slice = WeightSlice;

  Status AddWeights(const dcp::StoredState& state, const CommonState& common);
  Status CheckLayers(const dcp::StoredState& state, const CommonState& common) const;
  PlaceParts PlaceOf(const dcp::StoredState& state, Slice slice) const;
  void AddStates(const dcp::StoredState& state);
  void AddState(const dcp::StoredState& state, size_t tensor, const OptimizerKey& key);
  Status AddBuckets(dcp::StoredState& state, const CommonState& common);
  std::map<std::string_view, std::string_view> UnknownBuckets(const dcp::StoredState& state) const;
  void LeaveOutBuckets(const dcp::StoredState& state, const CommonState& common);
  Status AddAllGroups(const CommonState& common);
  void LeaveOutObjects(const dcp::StoredState& state);
  void FillHeader(const CommonState& common, std::optional<uint64_t> steps);

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  Assembler assembler_;
  StateDict dict_;
  std::set<std::pair<std::string, std::string>> states_;  // kind, stored key of the tensor
  std::vector<Slice> slices_;                             // by tensor of the dict
  std::map<std::string, std::vector<size_t>, std::less<>>
      made_;                                                // by stored key: of the dict, by layer
  std::vector<BucketStates> buckets_;                       // of optimizers that are proved
  std::map<std::string, std::string, std::less<>> chains_;  // by optimizer with buckets: "", or why
                                                            // it is not proved
};

}  // namespace ckptfs::megatron
