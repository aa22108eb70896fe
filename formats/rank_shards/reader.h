// SPDX-License-Identifier: Apache-2.0
//
// Reader makes a step of the files that an FSDP job's ranks wrote each for itself
// (step_files.h): the boxes that each rank holds of a tensor, as its pickle says them, are put
// together, and what they mean is settled as for any other source.
//
//   names       every rank has the same ones, in the module's order
//   ties        two names of one storage, on every rank
//   optimizer   by number; the trainers' rule (core/state/ownership.h): one group, which has all
//               trained parameters in the module's order
//
// Thread safety: one reader per step; files are parsed on TBB's threads.
// Lifetime: candidate and options must outlive the reader.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "core/state/state_dict.h"
#include "formats/rank_shards/rank_states.h"
#include "formats/rank_shards/shard_set.h"
#include "formats/rank_shards/sharded_optimizer.h"
#include "formats/rank_shards/step_files.h"

namespace ckptfs::rank_shards {

class Reader {
 public:
  Reader(const StepCandidate& candidate, const SourceOptions& options, StepFiles files)
      : candidate_(candidate), options_(options), files_(std::move(files)) {}

  Result<StepModel> Read() &&;

 private:
  Result<std::vector<BlobIndex>> Register(FileKind kind);
  Result<TorchFile> Open(FileKind kind, uint64_t rank) const;
  Status ReadModel(const std::vector<BlobIndex>& blobs);
  Status Combine(std::vector<RankModel> by_rank);
  Status ReadOptimizer(const std::vector<BlobIndex>& blobs);
  Status CheckSchedulers() const;
  void AddOptimizer(StateDict& dict) const;
  Status SettleAll();
  Status CarryFiles();
  Status LeaveOutOthers();

  const StepCandidate& candidate_;
  const SourceOptions& options_;
  const StepFiles files_;
  Assembler assembler_;
  std::vector<std::pair<std::string, ShardSet>> tensors_;          // in the module's order
  std::vector<std::pair<std::string, std::string>> second_names_;  // second name, name
  std::vector<std::string> others_;                                // entries, no tensors
  std::optional<ShardedOptimizer> optimizer_;
};

}  // namespace ckptfs::rank_shards
