// SPDX-License-Identifier: Apache-2.0
//
// LegacyReader makes a step of the files that ranks of Megatron write each for itself: weights
// under the names that dist_checkpointing gives them, so that the step is what the same job would
// have saved as torch_dist; masters and moments where it is proved whose they are
// (rank_optimizer.h).  All ranks' optimizers are taken or none is.
//
// Thread safety: one reader per step.
// Lifetime: the candidate and the options must outlive it.

#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/megatron/legacy/held_tensors.h"
#include "formats/megatron/legacy/rank_optimizer.h"
#include "formats/megatron/legacy/step_files.h"

namespace ckptfs::megatron {

class LegacyReader {
 public:
  LegacyReader(const StepCandidate& candidate, const SourceOptions& options, LegacyFiles files)
      : candidate_(candidate), options_(options), files_(std::move(files)) {}

  Result<StepModel> Read() &&;

 private:
  Result<std::vector<BlobIndex>> Register(std::string_view name);
  Result<TorchFile> Open(size_t rank, std::string_view name, BlobIndex blob);
  Status ReadRanks(const std::vector<BlobIndex>& blobs);
  Status AddWeights();
  Status ReadOptimizers(const std::vector<BlobIndex>& blobs);
  Status AddStates();
  Status AddState(const HeldTensor& tensor, const std::string& kind);
  Status AddSteps(const HeldTensor& tensor);
  Status AddAllGroups();
  void LeaveOutOptimizer(std::string why);
  void LeaveOutRest();
  void AddModuleKeys(const StageLayers& layers);
  void FillHeader(std::optional<uint64_t> steps);
  Status CarryFiles();

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  const LegacyFiles files_;
  Assembler assembler_;
  StateDict dict_;
  std::vector<RankModel> ranks_;
  std::vector<FlatFile> flat_;  // by rank
  HeldTensors tensors_;
  std::vector<RankStates> states_;  // by rank; none: the optimizer is left out
};

}  // namespace ckptfs::megatron
