// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/optimizer_chain.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/group_rule.h"
#include "formats/megatron/job/job_state.h"

namespace ckptfs::megatron {
namespace {

// Buffers of a router, which no optimizer has (moe/router.py).
constexpr std::string_view kBuffers[] = {".router.expert_bias", ".router.local_tokens_per_expert",
                                         ".router.global_tokens_per_expert"};

bool IsParameter(const NamedTensor& one) {
  return IsFloat(one.tensor.dtype()) && std::ranges::none_of(kBuffers, [&](std::string_view end) {
           return one.name.ends_with(end);
         });
}

// The dict that has the groups: FP32Optimizer saves torch's own.
PickleRef InnerOf(PickleRef root) {
  if (!root.IsDict() || root["param_groups"]) return root;
  return root["optimizer"];
}

std::vector<RankParameter> ParametersOf(const RankModel& rank, bool apart, bool experts) {
  std::vector<RankParameter> out;
  for (uint32_t chunk = 0; chunk < rank.chunks.size(); ++chunk) {
    const auto& tensors = rank.chunks[chunk].tensors;
    for (size_t entry = 0; entry < tensors.size(); ++entry) {
      if (!IsParameter(tensors[entry])) continue;
      if (apart && IsExperts(tensors[entry].name) != experts) continue;
      out.push_back({chunk, entry, &tensors[entry]});
    }
  }
  return out;
}

Result<ChainedOptimizer> ReadOne(PickleRef root, const RankModel& rank, bool apart) {
  ChainedOptimizer out;
  out.root = root;
  const PickleRef inner = root ? InnerOf(root) : PickleRef();
  if (!inner || !inner.IsDict() || !inner["param_groups"]) {
    return Refuse("an optimizer of it does not have param_groups");
  }
  out.groups = GroupsOf(inner);
  const bool experts = !out.groups.empty() && out.groups.front().experts;
  const auto same = [&](const CommonGroup& group) { return group.experts == experts; };
  if (!std::ranges::all_of(out.groups, same)) {
    return Refuse("an optimizer of it has groups of experts and others");
  }
  if (experts && !apart) return Refuse("it has groups of experts, but args say one expert rank");
  out.parameters = ParametersOf(rank, apart, experts);
  std::vector<StateDict::Tensor> tensors;
  for (const RankParameter& one : out.parameters) {
    tensors.push_back(
        {one.tensor->name, one.tensor->tensor.dtype(), one.tensor->tensor.shape(), {}});
  }
  auto members = MembersOf(out.groups, tensors, NormsDecay(rank.state));
  if (!members) {
    return Refuse(
        "Megatron's rule (experts of expert parallelism apart, weight decay for all but "
        "biases and vectors) does not say which of its groups have which parameters");
  }
  out.members = *std::move(members);
  return out;
}

}  // namespace

Result<std::vector<ChainedOptimizer>> OptimizersOf(const RankModel& rank, const JobDegrees& job) {
  std::vector<ChainedOptimizer> out;
  const PickleRef root = rank.state.root()["optimizer"];
  if (!root || root.IsNone()) return out;
  const bool apart = job.ep > 1;
  if (!root.IsSequence()) {
    CKPT_ASSIGN_OR_RETURN(ChainedOptimizer only, ReadOne(root, rank, apart));
    out.push_back(std::move(only));
    return out;
  }
  std::array<size_t, 2> counts = {};
  for (size_t i = 0; i < root.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(ChainedOptimizer one, ReadOne(root.at(i), rank, apart));
    const bool experts = !one.groups.empty() && one.groups.front().experts;
    if (++counts[experts ? 1 : 0] > 1) {
      return Refuse("it is a chain of several optimizers of ",
                    experts ? "experts" : "dense tensors",
                    ", and nothing tells which has which parameters");
    }
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace ckptfs::megatron
