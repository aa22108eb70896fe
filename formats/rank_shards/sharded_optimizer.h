// SPDX-License-Identifier: Apache-2.0
//
// ShardedOptimizer is the optimizer of all ranks' files: groups and members, which every rank has
// alike, and states, of which each rank has its part.  Ranks that count different steps, or have
// different settings, did not save the same moment, and the step is refused.
//
// Thread safety: values.
// Lifetime: a dict that it was added to refers to it.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/state/state_dict.h"
#include "formats/rank_shards/rank_states.h"
#include "formats/rank_shards/shard_set.h"

namespace ckptfs::rank_shards {

class ShardedOptimizer {
 public:
  // Joins those of ranks 0, 1, ..., of which there is one.  kInvalid: they are not of one save.
  static Result<ShardedOptimizer> Make(std::vector<RankOptimizer> by_rank);

  // Why the optimizer as a whole says nothing; "" where it does.
  const std::string& why_not() const { return why_not_; }
  const std::vector<LeftOut>& left_out() const { return torch_.left_out; }

  // The reader's answer (StateDict::keep) for a state that has neither a place nor a number.
  StateDict::Fate FateOf(const StateDict::State& state) const;

  // Adds its groups, members and states as those of one of the dict's optimizers.
  // REQUIRES: why_not() is "".
  void AddTo(size_t optimizer, StateDict& dict) const;

 private:
  using Key = std::pair<int64_t, std::string>;
  Status TakeStates(std::vector<RankOptimizer>& by_rank);

  deepspeed::TorchOptimizer torch_;  // rank 0's
  std::map<Key, ShardSet> states_;
  std::map<Key, std::string> strangers_;
  std::string why_not_;
};

}  // namespace ckptfs::rank_shards
