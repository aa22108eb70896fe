// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native_view/partitions.h"

#include <algorithm>
#include <utility>

#include "core/base/checked_math.h"
#include "core/view/shard.h"

namespace ckptfs::deepspeed {
namespace {

// nccl_start_alignment_factor of stages 1 and 2: what each partition is a multiple of.
constexpr uint64_t kUnit = 2;

// Appends the sub-groups of a group (stage3.py _create_fp16_sub_groups).
void CutSubGroups(FlatGroup group, const TargetEngine& engine, std::vector<FlatGroup>& out) {
  uint64_t all = 0;
  for (const FlatMember& member : group.members) all += CeilDiv(member.elements, engine.dp);
  if (engine.sub_group_size >= all) {
    out.push_back(std::move(group));
    return;
  }
  FlatGroup next{group.number, {}};
  uint64_t elements = 0;
  for (FlatMember& member : group.members) {
    elements += CeilDiv(member.elements, engine.dp);
    next.members.push_back(std::move(member));
    if (elements < engine.sub_group_size) continue;
    out.push_back(std::exchange(next, FlatGroup{group.number, {}}));
    elements = 0;
  }
  if (!next.members.empty()) out.push_back(std::move(next));
}

}  // namespace

Result<std::vector<FlatGroup>> FlatGroupsOf(const ShownState& shown, const TargetEngine& engine,
                                            const RankCoordinate& at) {
  const StepModel& step = shown.step();
  std::vector<FlatGroup> out;
  for (size_t g = 0; g < engine.groups.size(); ++g) {
    FlatGroup group{g, {}};
    for (const ParameterIndex parameter : engine.groups[g]) {
      CKPT_ASSIGN_OR_RETURN(auto local,
                            LocalOf(step, shown.layout(), at, step.parameter(parameter)));
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(local->shape));
      group.members.push_back({parameter, std::move(local), elements});
    }
    if (engine.stage == 3) {
      CutSubGroups(std::move(group), engine, out);
    } else {
      out.push_back(std::move(group));
    }
  }
  return out;
}

Partition PartitionOf(const FlatGroup& group, const TargetEngine& engine, uint32_t dp) {
  Partition out;
  if (engine.stage == 3) {
    for (const FlatMember& member : group.members) {
      const auto [begin, end] = ZeroRange(member.elements, dp, engine.dp);
      out.spans.push_back({&member, begin, end});
      out.elements += end - begin;
    }
    return out;
  }
  uint64_t total = 0;
  for (const FlatMember& member : group.members) total += member.elements;
  out.elements = CeilDiv(total, kUnit * engine.dp) * kUnit;
  const uint64_t begin = dp * out.elements;
  const uint64_t end = begin + out.elements;
  uint64_t start = 0;  // of a member
  for (const FlatMember& member : group.members) {
    const uint64_t from = std::max(begin, start);
    const uint64_t to = std::min(end, start + member.elements);
    if (from < to) out.spans.push_back({&member, from - start, to - start});
    start += member.elements;
  }
  out.padding = end - std::clamp(total, begin, end);
  return out;
}

}  // namespace ckptfs::deepspeed
