// SPDX-License-Identifier: Apache-2.0
//
// NativeReader: ZeRO partitions under their atoms.

#include <algorithm>
#include <iterator>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/deepspeed/expert_names.h"
#include "formats/deepspeed/native_reader.h"
#include "formats/deepspeed/zero_layout.h"

namespace ckptfs::deepspeed {
namespace {

// A flat tensor of a partition by kind: "master" or an optimizer's own name.
const FileTensor* FindFlat(const PartitionStates& partition, std::string_view kind) {
  if (kind == "master") return partition.master ? &*partition.master : nullptr;
  for (const NamedTensor& entry : partition.flat) {
    if (entry.name == kind) return &entry.tensor;
  }
  return nullptr;
}

std::vector<std::string> KindsOf(const PartitionStates& partition) {
  std::vector<std::string> kinds{"master"};
  for (const NamedTensor& entry : partition.flat) kinds.push_back(entry.name);
  return kinds;
}

// A name that one of two sorted lists has and the other has not.
std::optional<std::string> Difference(const std::vector<std::string>& a,
                                      const std::vector<std::string>& b) {
  std::vector<std::string> only;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(only));
  return only.empty() ? std::nullopt : std::optional(std::move(only.front()));
}

}  // namespace

uint32_t NativeReader::ExpertRanks(uint32_t mp, size_t group) const {
  const OptimizerStates& first = optimizers_.at(RankKey{mp, 0});
  if (group >= first.partition_count.size() || first.partition_count[group] == 0) return 1;
  return static_cast<uint32_t>(dp_ / std::min<uint64_t>(first.partition_count[group], dp_));
}

bool NativeReader::IsExpertGroup(uint32_t mp, size_t group) const {
  const auto first = optimizers_.find(RankKey{mp, 0});
  return first != optimizers_.end() && group < first->second.groups.size() &&
         first->second.groups[group].experts;
}

Result<NativeReader::FlatGroup> NativeReader::DescribeGroup(
    uint32_t mp, size_t index, RankFiles ranks, std::optional<uint32_t> expert_rank) const {
  FlatGroup group;
  group.stage = mp / tp_;
  group.tp = mp % tp_;
  group.index = index;
  group.ranks = std::move(ranks);
  const std::vector<NamedShape>& shapes = ModelOf(mp).groups[index];
  for (const NamedShape& entry : shapes) {
    std::string name = entry.name;
    if (expert_rank) {
      CKPT_ASSIGN_OR_RETURN(name, local_experts_.at(mp).Global(entry.name, *expert_rank));
    }
    group.names.push_back(std::move(name));
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(entry.shape));
    group.members.push_back(elements);
  }
  const OptimizerStates& first = *group.ranks.front();
  if (index < first.member_paddings.size()) group.paddings = first.member_paddings[index];
  for (const OptimizerStates* rank : group.ranks) {
    if (rank->partitions.size() != ModelOf(mp).groups.size()) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(rank->file, ": ", rank->partitions.size(), " partitions, but ",
                         ModelOf(mp).file, " names the parameters of ", ModelOf(mp).groups.size()));
    }
    if (rank->member_paddings != first.member_paddings) {
      return Fail(ErrorCode::kInvalid, StrCat(rank->file, ": param_alignment_paddings differ from ",
                                              first.file, "; two runs lie in one directory"));
    }
  }
  return group;
}

// Elements of every rank's partition, padding included.
Result<uint64_t> NativeReader::PartitionSize(const FlatGroup& group) const {
  uint64_t size = 0;
  uint64_t padding = 0;
  for (const OptimizerStates* rank : group.ranks) {
    const PartitionStates& own = rank->partitions[group.index];
    const uint64_t elements = own.master->elements() + own.padding;
    if (rank == group.ranks.front()) size = elements;
    if (elements != size) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(rank->file, ": group ", group.index, " has a partition of ", elements,
                         " elements, ", group.ranks.front()->file, " one of ", size));
    }
    padding += own.padding;
  }
  uint64_t total = 0;
  for (size_t i = 0; i < group.members.size(); ++i) {
    CKPT_ASSIGN_OR_RETURN(total, CheckedAdd(total, group.members[i], "elements of a group"));
    if (i < group.paddings.size()) {
      CKPT_ASSIGN_OR_RETURN(total, CheckedAdd(total, group.paddings[i], "elements of a group"));
    }
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t capacity,
                        CheckedMul(size, group.ranks.size(), "elements of a group"));
  const bool trimmed = group.ranks.front()->trimmed;
  const bool fits = total <= capacity && (trimmed ? capacity - total == padding
                                                  : capacity - total < 16 * group.ranks.size());
  if (!fits) {
    return Fail(ErrorCode::kInvalid,
                StrCat(group.ranks.front()->file, ": group ", group.index, " has ",
                       group.ranks.size(), " partitions of ", size, " elements (", padding,
                       " padding), its parameters ", total, " elements"));
  }
  return size;
}

Status NativeReader::CheckSameStates(const FlatGroup& group) {
  const OptimizerStates& first = *group.ranks.front();
  const std::vector<std::string> states = StateNames(first.partitions[group.index]);
  for (const OptimizerStates* rank : group.ranks) {
    const auto other = Difference(states, StateNames(rank->partitions[group.index]));
    if (!other) continue;
    return Fail(ErrorCode::kInvalid,
                StrCat("only one of ", first.file, " and ", rank->file, " has optimizer state ",
                       *other, " of group ", group.index, "; two runs lie in one directory"));
  }
  for (const std::string& name : group.names) {
    CKPT_RETURN_IF_ERROR(CheckStates(name, first.file, states));
  }
  return {};
}

// A parameter has the same states wherever it lies: on tensor-parallel ranks,
// replicas, pipeline stages.  Otherwise a state of some ranks would be shown
// without the others' part, or averaged without it.
Status NativeReader::CheckStates(const std::string& name, const std::string& file,
                                 const std::vector<std::string>& states) {
  Known& known = known_.at(name);
  if (known.states_file.empty()) {
    known.states_file = file;
    known.states = states;
    return {};
  }
  const auto other = Difference(known.states, states);
  if (!other) return {};
  return Fail(ErrorCode::kInvalid,
              StrCat("only one of ", known.states_file, " and ", file, " has optimizer state ",
                     *other, " of '", name, "'"));
}

// What all ranks say of one value: "step".
Status NativeReader::PlaceScalars(const FlatGroup& group) {
  const PartitionStates& first = group.ranks.front()->partitions[group.index];
  for (const NamedScalar& scalar : first.scalars) {
    for (const OptimizerStates* rank : group.ranks) {
      for (const NamedScalar& other : rank->partitions[group.index].scalars) {
        if (other.name != scalar.name || other.value == scalar.value) continue;
        return Fail(ErrorCode::kInvalid,
                    StrCat(rank->file, ": optimizer state '", scalar.name, "' of group ",
                           group.index, " differs from that in ", group.ranks.front()->file,
                           "; two runs lie in one directory"));
      }
    }
    for (const std::string& name : group.names) CKPT_RETURN_IF_ERROR(SetScalar(name, scalar));
  }
  return {};
}

Status NativeReader::PlaceFlatGroup(const FlatGroup& group) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t size, PartitionSize(group));
  CKPT_RETURN_IF_ERROR(CheckSameStates(group));
  const PartitionStates& first = group.ranks.front()->partitions[group.index];
  Status outcome;
  for (const std::string& kind : KindsOf(first)) {
    const DType dtype = FindFlat(first, kind)->dtype();
    std::optional<uint32_t> member;
    Place place;
    const auto visit = [&](const ZeroSpan& span) {
      if (!outcome) return;
      const std::string& name = group.names[span.member];
      if (member != span.member) {
        Known& known = known_.at(name);
        auto at = PlaceIn(name, kind, dtype, known.slots.at(group.stage), group.tp);
        if (!at) {
          outcome = Fail(std::move(at).error());
          return;
        }
        place = *at;
        member = span.member;
        if (kind == "master") known.master = place.atom;
      }
      const OptimizerStates& rank = *group.ranks[span.rank];
      const FileTensor* tensor = FindFlat(rank.partitions[group.index], kind);
      CKPT_CHECK(tensor != nullptr);  // CheckSameStates
      auto fragment = tensor->Slice(span.at, span.begin, span.end);
      if (!fragment) {
        outcome = Fail(std::move(fragment).error().WithContext(
            StrCat(rank.file, ": '", kind, "' of '", name, "' in group ", group.index)));
        return;
      }
      assembler_.AddFragment(place.atom, place.copy, place.local, *fragment);
    };
    CKPT_RETURN_IF_ERROR(
        stage_ == 3 ? VisitSubGroup(group.members, static_cast<uint32_t>(group.ranks.size()), visit)
                          .map([](uint64_t) {})
                    : VisitFlatGroup(group.members, group.paddings, size,
                                     static_cast<uint32_t>(group.ranks.size()), visit));
    CKPT_RETURN_IF_ERROR(outcome);
  }
  return PlaceScalars(group);
}

Status NativeReader::PlaceDense(uint32_t mp, size_t index) {
  RankFiles ranks;
  for (uint32_t dp = 0; dp < dp_; ++dp) ranks.push_back(&optimizers_.at(RankKey{mp, dp}));
  const OptimizerStates& first = *ranks.front();
  const uint64_t count = stage_ == 3 ? (first.partition_count.empty() ? dp_ : first.partition_count[0])
                         : index < first.partition_count.size() ? first.partition_count[index]
                                                                : dp_;
  if (count != dp_) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(first.file, ": group ", index, " is cut into ", count, " partitions over ",
                       dp_, " data-parallel ranks (MiCS and the like are not understood)"));
  }
  CKPT_ASSIGN_OR_RETURN(const FlatGroup group,
                        DescribeGroup(mp, index, std::move(ranks), std::nullopt));
  CKPT_RETURN_IF_ERROR(PlaceFlatGroup(group));
  return AddToGroup(mp, index, group.names);
}

// One flat group per expert-parallel rank, of those data-parallel ranks that share its experts.
Status NativeReader::PlaceExperts(uint32_t mp, size_t index) {
  const uint32_t expert_ranks = ExpertRanks(mp, index);
  const uint32_t replicas = dp_ / expert_ranks;
  for (uint32_t expert = 0; expert < expert_ranks; ++expert) {
    RankFiles ranks;
    for (uint32_t i = 0; i < replicas; ++i) {
      const uint32_t dp = ModelOf(mp).experts_first ? expert * replicas + i : i * expert_ranks + expert;
      ranks.push_back(&optimizers_.at(RankKey{mp, dp}));
    }
    CKPT_ASSIGN_OR_RETURN(const FlatGroup group, DescribeGroup(mp, index, std::move(ranks), expert));
    CKPT_RETURN_IF_ERROR(PlaceFlatGroup(group));
    CKPT_RETURN_IF_ERROR(AddToGroup(mp, index, group.names));
  }
  return {};
}

// `partition`: the group (stages 1, 2) or the sub-group (stage 3).
Status NativeReader::AddToGroup(uint32_t mp, size_t partition, std::span<const std::string> names) {
  const OptimizerStates& states = optimizers_.at(RankKey{mp, 0});
  size_t index = partition;
  if (stage_ == 3) {
    const auto found = std::find_if(
        states.groups.begin(), states.groups.end(), [partition](const HyperGroup& group) {
          return std::find(group.members.begin(), group.members.end(),
                           static_cast<int64_t>(partition)) != group.members.end();
        });
    if (found == states.groups.end()) {
      return Fail(ErrorCode::kInvalid,
                  StrCat(states.file, ": sub-group ", partition, " is in no param_groups entry"));
    }
    index = static_cast<size_t>(found - states.groups.begin());
  }
  MergeGroup(index, index < states.groups.size() ? states.groups[index].hyper_parameters : "", names);
  return {};
}

void NativeReader::MergeGroup(size_t index, const std::string& hyper_parameters,
                              std::span<const std::string> names) {
  if (groups_.size() <= index) {
    groups_.resize(index + 1);
    grouped_.resize(index + 1);
  }
  Group& group = groups_[index];
  if (group.hyper_parameters.empty()) group.hyper_parameters = hyper_parameters;
  for (const std::string& name : names) {
    if (grouped_[index].insert(name).second) group.parameters.push_back(known_.at(name).index);
  }
}

Status NativeReader::PlaceOptimizer() {
  for (uint32_t mp = 0; mp < tp_ * pp_; ++mp) {
    const ModelStates& model = ModelOf(mp);
    if (!model.has_shapes) {
      return Fail(ErrorCode::kInvalid, StrCat(model.file, ": no param_shapes; the flat optimizer "
                                              "partitions cannot be told apart without"));
    }
    for (size_t g = 0; g < model.groups.size(); ++g) {
      CKPT_RETURN_IF_ERROR(stage_ != 3 && IsExpertGroup(mp, g) ? PlaceExperts(mp, g)
                                                               : PlaceDense(mp, g));
    }
  }
  return {};
}

}  // namespace ckptfs::deepspeed
