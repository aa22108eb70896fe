// SPDX-License-Identifier: Apache-2.0
//
// Masters and optimizer states: flat partitions of ZeRO's ranks, and stage 0's,
// flat or whole.

#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <set>
#include <span>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/state/state_fit.h"
#include "formats/deepspeed/native/momenta.h"
#include "formats/deepspeed/native/placed.h"
#include "formats/deepspeed/zero_layout.h"
#include "formats/settle/settle.h"

namespace ckptfs::deepspeed::native {
namespace {

constexpr std::string_view kElements = "elements of a group";

// The part of a flat group in one rank's file.
struct FlatPart {
  const std::string* file = nullptr;
  const PartitionStates* states = nullptr;
  const FileTensor* momenta = nullptr;  // of Parsed: Muon's
};

// States refer to it until they are placed.
struct FlatGroup {
  const NamedGroup& named;
  int stage = 1;
  std::vector<FlatPart> ranks = {};         // in partition order
  std::deque<PartitionStates> own = {};     // those of `ranks` that differ from their files'
  std::vector<uint64_t> members = {};       // elements of each parameter
  std::vector<uint64_t> starts = {};        // of each: in the group, or in a rank's sub-group
  std::span<const uint64_t> paddings = {};  // after each; may be fewer
  uint64_t partition = 0;                   // elements of each rank's, padding included
  bool trimmed = false;                     // masters lack the padding that the file tells
};

// The states of a parameter in the first file that has its optimizer.
struct SeenStates {
  const std::string* file = nullptr;
  std::vector<std::string> names;  // StateNames
};

// The state shared while groups are placed.
struct Placing {
  const Parsed& parsed;
  const Named& named;
  StateDict& dict;
  StepModel& header;
  std::vector<SeenStates> seen;  // by ParameterIndex
  // Stage 0: what each tensor-parallel rank holds, the masters of a torch optimizer.
  std::map<std::pair<ParameterIndex, uint32_t>, const FileTensor*> weights;
  std::map<size_t, std::set<std::string>> uneven;  // by group: states that some rank cannot place
  Momenta momenta;

  Holder HolderOf(const NamedGroup& group, ParameterIndex parameter) const {
    return Holder{named[parameter].PlaceOf(group.mp / parsed.tp), group.mp % parsed.tp};
  }
  const Shape& ShapeOf(const NamedGroup& group, ParameterIndex parameter) const {
    const Shape* shape = named[parameter].ShapeOn(group.mp / parsed.tp, group.mp % parsed.tp);
    CKPT_CHECK(shape != nullptr);  // the group was named by this rank
    return *shape;
  }
  // Adds a state of a parameter as the group's rank has it.
  StateDict::State& Add(const NamedGroup& group, ParameterIndex parameter, std::string kind) {
    StateDict::State& added = dict.states.emplace_back(
        StateDict::State{group.mp, named[parameter].name, std::move(kind)});
    added.shape = ShapeOf(group, parameter);
    added.rank = group.mp % parsed.tp;
    return added;
  }
};

// A flat tensor of a partition by kind: "master" or an optimizer's own name.
const FileTensor* FindFlat(const PartitionStates& partition, std::string_view kind) {
  if (kind == "master") return partition.master ? &*partition.master : nullptr;
  for (const NamedTensor& entry : partition.flat) {
    if (entry.name == kind) return &entry.tensor;
  }
  return nullptr;
}

// The states of a partition but for those that some rank of the group cannot place.
// REQUIRES: there are some.
PartitionStates Placeable(const PartitionStates& partition, size_t group, const Placing& placing) {
  PartitionStates out = partition;
  const std::set<std::string>& uneven = placing.uneven.at(group);
  const auto listed = [&](const auto& entry) { return uneven.contains(entry.name); };
  std::erase_if(out.flat, listed);
  std::erase_if(out.scalars, listed);
  std::erase_if(out.opaque, [&](const std::string& name) { return uneven.contains(name); });
  return out;
}

// Lists what ranks cannot place, group by group.
void ListUneven(Placing& placing) {
  for (const auto& [key, states] : placing.parsed.optimizers) {
    for (size_t g = 0; g < states.partitions.size(); ++g) {
      for (const UnevenState& state : states.partitions[g].uneven) {
        if (!placing.uneven[g].insert(state.name).second) continue;
        LeaveOut(placing.header,
                 {LeftOutPart::kOptimizer,
                  StrCat("optimizer state '", state.name, "' of group ", g), state.why, ""});
      }
    }
  }
}

void ListSettings(Placing& placing) {
  std::vector<HyperGroup> groups;
  for (const auto& [key, states] : placing.parsed.optimizers) {
    groups.insert(groups.end(), states.groups.begin(), states.groups.end());
  }
  for (LeftOut& one : LeftOutSettings(groups, "only deepspeed/ and deepspeed_native/ have it")) {
    LeaveOut(placing.header, std::move(one));
  }
}

std::vector<std::string> KindsOf(const PartitionStates& partition) {
  std::vector<std::string> kinds{"master"};
  for (const NamedTensor& entry : partition.flat) kinds.push_back(entry.name);
  return kinds;
}

// A name that one of two sorted lists has and the other does not.
std::optional<std::string> Difference(const std::vector<std::string>& a,
                                      const std::vector<std::string>& b) {
  std::vector<std::string> only;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(only));
  return only.empty() ? std::nullopt : std::optional(std::move(only.front()));
}

// A parameter has the same states wherever it lies: on tensor-parallel ranks,
// replicas, pipeline stages.  Otherwise a state of some ranks would be shown
// without the others' part, or averaged without it.
Status CheckStates(ParameterIndex parameter, const std::string& file,
                   const std::vector<std::string>& states, Placing& placing) {
  SeenStates& seen = placing.seen[static_cast<uint32_t>(parameter)];
  if (seen.file == nullptr) {
    seen = SeenStates{&file, states};
    return {};
  }
  const auto other = Difference(seen.names, states);
  if (!other) return {};
  return Refuse("only one of ", *seen.file, " and ", file, " has optimizer state ", *other, " of '",
                placing.named[parameter].name, "'");
}

Status CheckSameStates(const FlatGroup& group, Placing& placing) {
  const FlatPart& first = group.ranks.front();
  const std::vector<std::string> states = StateNames(*first.states);
  for (const FlatPart& rank : group.ranks) {
    const auto other = Difference(states, StateNames(*rank.states));
    if (!other) continue;
    return Refuse("only one of ", *first.file, " and ", *rank.file, " has optimizer state ", *other,
                  " of group ", group.named.number, "; two runs lie in one directory");
  }
  for (const ParameterIndex parameter : group.named.parameters) {
    CKPT_RETURN_IF_ERROR(CheckStates(parameter, *first.file, states, placing));
  }
  return {};
}

// Finds out how long every rank's partition is, and where each parameter begins.
Status Measure(FlatGroup& group) {
  const FlatPart& first = group.ranks.front();
  uint64_t& size = group.partition;
  uint64_t padding = 0;
  for (const FlatPart& rank : group.ranks) {
    const uint64_t elements = rank.states->master->elements() + rank.states->padding;
    if (&rank == &first) size = elements;
    if (elements != size) {
      return Refuse(*rank.file, ": group ", group.named.number, " has a partition of ", elements,
                    " elements, ", *first.file, " has one of ", size);
    }
    padding += rank.states->padding;
  }
  const uint64_t ranks = group.ranks.size();
  uint64_t total = 0;
  uint64_t slices = 0;
  for (size_t i = 0; i < group.members.size(); ++i) {
    // Stage 3 cuts each parameter alone, into parts of equal length.
    uint64_t elements = group.members[i];
    group.starts.push_back(group.stage == 3 ? slices : total);
    slices += CeilDiv(elements, ranks);
    if (group.stage == 3) {
      CKPT_ASSIGN_OR_RETURN(elements, CheckedMul(CeilDiv(elements, ranks), ranks, kElements));
    }
    CKPT_ASSIGN_OR_RETURN(total, CheckedAdd(total, elements, kElements));
    if (i < group.paddings.size()) {
      CKPT_ASSIGN_OR_RETURN(total, CheckedAdd(total, group.paddings[i], kElements));
    }
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t capacity, CheckedMul(size, ranks, kElements));
  const bool fits = total <= capacity &&
                    (group.trimmed ? capacity - total == padding : capacity - total < 16 * ranks);
  if (!fits) {
    return Refuse(*first.file, ": group ", group.named.number, " has ", group.ranks.size(),
                  " partitions of ", size, " elements (", padding,
                  " padding), but its parameters "
                  "have ",
                  total, " elements");
  }
  return {};
}

// The values of all ranks for one key: "step".
Status PlaceScalars(const FlatGroup& group, Placing& placing) {
  const FlatPart& first = group.ranks.front();
  for (const NamedScalar& scalar : first.states->scalars) {
    for (const FlatPart& rank : group.ranks) {
      for (const NamedScalar& other : rank.states->scalars) {
        if (other.name != scalar.name || other.value == scalar.value) continue;
        return Refuse(*rank.file, ": optimizer state '", scalar.name, "' of group ",
                      group.named.number, " differs from that in ", *first.file,
                      "; two runs lie in one directory");
      }
    }
    for (const ParameterIndex parameter : group.named.parameters) {
      StateDict::State& added = placing.Add(group.named, parameter, scalar.name);
      added.kinds = StateDict::Kinds::kOurs;
      added.shape = scalar.value.shape;
      added.scalar = [value = scalar.value] { return std::optional(value); };
    }
  }
  return {};
}

// A parameter's spans of the ranks' partitions of one kind.
PlaceParts PlaceSpans(std::shared_ptr<const FlatGroup> group, uint32_t member, std::string kind,
                      Holder holder) {
  return [=](Assembler& assembler, AtomParts& atom) -> Status {
    CKPT_ASSIGN_OR_RETURN(const auto local, atom.Add(holder));
    const auto visit = [&](const ZeroSpan& span) -> Status {
      const FlatPart& rank = group->ranks[span.rank];
      const FileTensor* tensor = FindFlat(*rank.states, kind);
      CKPT_CHECK(tensor != nullptr);  // CheckSameStates
      auto fragment = tensor->Slice(span.at, span.begin, span.end);
      if (!fragment) {
        const StepModel& step = assembler.header();
        return Fail(std::move(fragment).error().WithContext(StrCat(
            *rank.file, ": '", kind, "' of '", step.parameter(step.atom(atom).parameter).name,
            "' in group ", group->named.number)));
      }
      atom.AddFragment(local, *fragment);
      return {};
    };
    const uint64_t start = group->starts[member];
    const uint64_t elements = group->members[member];
    if (group->stage != 3) return VisitFlatMember(start, elements, group->partition, visit);
    return VisitSlices(elements, static_cast<uint32_t>(group->ranks.size()), start, visit);
  };
}

void AddKind(const std::shared_ptr<const FlatGroup>& group, const std::string& kind,
             Placing& placing) {
  const DType dtype = FindFlat(*group->ranks.front().states, kind)->dtype();
  for (uint32_t i = 0; i < group->members.size(); ++i) {
    const ParameterIndex parameter = group->named.parameters[i];
    StateDict::State& added = placing.Add(group->named, parameter, kind);
    added.dtype = dtype;
    added.kinds = StateDict::Kinds::kOurs;
    added.place = PlaceSpans(group, i, kind, placing.HolderOf(group->named, parameter));
  }
}

// Only what Muon's groups have is kept for later: all holders of a parameter must be known.
void AddMomenta(const FlatGroup& group, Placing& placing) {
  std::vector<MomentumBuffer> buffers;
  for (const FlatPart& rank : group.ranks) {
    buffers.push_back({rank.file, rank.momenta});
  }
  std::vector<Holder> holders;
  for (const ParameterIndex parameter : group.named.parameters) {
    holders.push_back(placing.HolderOf(group.named, parameter));
  }
  placing.momenta.Add(
      SharedGroup{group.named.parameters, holders, group.members, group.starts, group.partition},
      buffers);
}

Status PlaceFlat(const std::shared_ptr<FlatGroup>& group, Placing& placing) {
  for (const ParameterIndex parameter : group->named.parameters) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements,
                          ElementCount(placing.ShapeOf(group->named, parameter)));
    group->members.push_back(elements);
  }
  CKPT_RETURN_IF_ERROR(Measure(*group));
  CKPT_RETURN_IF_ERROR(CheckSameStates(*group, placing));
  for (const std::string& kind : KindsOf(*group->ranks.front().states)) {
    AddKind(group, kind, placing);
  }
  if (group->stage != 3) AddMomenta(*group, placing);
  return PlaceScalars(*group, placing);
}

// The data-parallel ranks that share the group, in partition order: all, or those
// that hold one expert-parallel rank's experts.
Result<std::vector<uint32_t>> RanksOf(const Parsed& parsed, const NamedGroup& group) {
  const OptimizerStates& first = parsed.optimizers.at(RankKey{group.mp, 0});
  const auto& counts = first.partition_count;
  const size_t at = parsed.stage == 3 ? 0 : group.number;
  const uint64_t count = at < counts.size() ? counts[at] : parsed.dp;
  if (!group.expert_rank && count != parsed.dp) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(first.file, ": group ", group.number, " is cut into ", count,
                       " partitions over ", parsed.dp,
                       " data-parallel ranks (ckptfs does not understand MiCS and similar "
                       "schemes)"));
  }
  const uint32_t experts = parsed.ExpertRanks(group.mp, group.number).value_or(1);
  const uint32_t expert = group.expert_rank.value_or(0);
  const uint32_t replicas = parsed.dp / experts;
  const bool together = parsed.model(group.mp).experts_first;
  std::vector<uint32_t> ranks;
  for (uint32_t i = 0; i < replicas; ++i) {
    ranks.push_back(together ? expert * replicas + i : i * experts + expert);
  }
  return ranks;
}

// The optimizer's group that a flat group or sub-group belongs to.
Result<size_t> OptimizerGroup(const Parsed& parsed, const NamedGroup& group) {
  const OptimizerStates& states = parsed.optimizers.at(RankKey{group.mp, 0});
  if (parsed.stage != 3) return group.number;
  // An only group that lists nothing has all.
  if (states.groups.size() == 1 && states.groups[0].members.empty()) return 0;
  const auto found =
      std::find_if(states.groups.begin(), states.groups.end(), [&](const HyperGroup& entry) {
        return std::find(entry.members.begin(), entry.members.end(),
                         static_cast<int64_t>(group.number)) != entry.members.end();
      });
  if (found != states.groups.end()) return static_cast<size_t>(found - states.groups.begin());
  return Refuse(states.file, ": sub-group ", group.number, " is not in any param_groups entry");
}

void AddToGroup(size_t number, const std::vector<HyperGroup>& hyper, const NamedGroup& group,
                Placing& placing) {
  StateDict::Group added{
      group.mp, number < hyper.size() ? hyper[number].hyper_parameters : "", {}, number};
  for (const ParameterIndex parameter : group.parameters) {
    added.members.push_back({placing.named[parameter].name, std::nullopt});
  }
  placing.dict.groups.push_back(std::move(added));
}

Status PlacePartitions(const NamedGroup& named, Placing& placing) {
  const Parsed& parsed = placing.parsed;
  const ModelStates& model = parsed.model(named.mp);
  CKPT_ASSIGN_OR_RETURN(const std::vector<uint32_t> ranks, RanksOf(parsed, named));
  const OptimizerStates& first = parsed.optimizers.at(RankKey{named.mp, ranks.front()});
  const auto group = std::make_shared<FlatGroup>(FlatGroup{named, parsed.stage});
  group->trimmed = first.trimmed;
  if (named.number < first.member_paddings.size()) {
    group->paddings = first.member_paddings[named.number];
  }
  for (const uint32_t dp : ranks) {
    const OptimizerStates& rank = parsed.optimizers.at(RankKey{named.mp, dp});
    if (rank.partitions.size() != model.groups.size()) {
      return Refuse(rank.file, ": ", rank.partitions.size(), " partitions, but ", model.file,
                    " names the parameters of ", model.groups.size());
    }
    if (rank.member_paddings != first.member_paddings) {
      return Refuse(rank.file, ": param_alignment_paddings differ from ", first.file,
                    "; two runs lie in one directory");
    }
    const PartitionStates& own = rank.partitions[named.number];
    const bool uneven = placing.uneven.contains(named.number);
    if (uneven) group->own.push_back(Placeable(own, named.number, placing));
    group->ranks.push_back(FlatPart{&rank.file, uneven ? &group->own.back() : &own,
                                    own.momenta ? &*own.momenta : nullptr});
  }
  CKPT_RETURN_IF_ERROR(PlaceFlat(group, placing));
  CKPT_ASSIGN_OR_RETURN(const size_t number, OptimizerGroup(parsed, named));
  AddToGroup(number, parsed.optimizers.at(RankKey{named.mp, 0}).groups, named, placing);
  return {};
}

const PartitionStates& StatesOf(const UnshardedOptimizer& optimizer, int64_t index) {
  static const PartitionStates none;
  const auto found = optimizer.states.find(index);
  return found == optimizer.states.end() ? none : found->second;
}

// Stage 0, masters and states with the parameters' own shapes.
Status PlaceWhole(const NamedGroup& group, const UnshardedOptimizer& optimizer, Placing& placing) {
  const std::string& file = placing.parsed.model(group.mp).file;
  const uint32_t tp = group.mp % placing.parsed.tp;
  for (size_t i = 0; i < group.parameters.size(); ++i) {
    const ParameterIndex parameter = group.parameters[i];
    const size_t member = group.members[i];
    const auto& masters = optimizer.parameter_masters;
    const bool own = group.number < masters.size() && member < masters[group.number].size();
    const FileTensor& tensor =
        own ? masters[group.number][member] : *placing.weights.at({parameter, tp});
    const Holder holder = placing.HolderOf(group, parameter);
    StateDict::State& master = placing.Add(group, parameter, "master");
    master.kinds = StateDict::Kinds::kOurs;
    master.relation = Relation::kSame;
    master.dtype = tensor.dtype();
    master.place = PlaceTensor(tensor, holder);
    const PartitionStates& states =
        StatesOf(optimizer, optimizer.groups[group.number].members[member]);
    CKPT_RETURN_IF_ERROR(CheckStates(parameter, file, StateNames(states), placing));
    StateDict::State like{group.mp, placing.named[parameter].name, ""};
    like.rank = tp;
    AddTo(states, like, holder, placing.dict);
  }
  return {};
}

// Leaves out the states of a fused group that cannot be cut like its master.
void LeaveOutOfFused(size_t group, PartitionStates& states, StepModel& header) {
  const auto leave = [&](std::string_view name, std::string why) {
    LeaveOut(header, {LeftOutPart::kOptimizer,
                      StrCat("optimizer state '", name, "' of group ", group), std::move(why), ""});
    return true;
  };
  std::erase_if(states.flat, [&](const NamedTensor& entry) {
    if (IsOurs(entry.name)) return leave(entry.name, std::string(kNameOfOurs));
    if (entry.tensor.shape() == states.master->shape()) return false;
    return leave(entry.name, StrCat("its shape ", ShapeToString(entry.tensor.shape()),
                                    " is not that of the group's flat master, ",
                                    ShapeToString(states.master->shape())));
  });
  std::erase_if(states.scalars, [&](const NamedScalar& entry) {
    return IsOurs(entry.name) && leave(entry.name, std::string(kNameOfOurs));
  });
  for (const std::string& name : states.opaque) {
    if (std::ranges::find(states.nothing, name) != states.nothing.end()) continue;
    leave(name, "it is neither a plain tensor nor a number");
  }
}

// Stage 0, one flat tensor per group and kind: a group of ZeRO on one rank.
Status PlaceFused(const NamedGroup& group, const UnshardedOptimizer& optimizer, Placing& placing) {
  const std::string& file = placing.parsed.model(group.mp).file;
  const auto flat = std::make_shared<FlatGroup>(FlatGroup{group, placing.parsed.stage});
  PartitionStates& states =
      flat->own.emplace_back(StatesOf(optimizer, static_cast<int64_t>(group.number)));
  states.master = optimizer.flat_masters[group.number];
  LeaveOutOfFused(group.number, states, placing.header);
  flat->ranks.push_back({&file, &states});
  return PlaceFlat(flat, placing);
}

}  // namespace

Status AddOptimizers(const Parsed& parsed, const Named& named, StateDict& dict, StepModel& header) {
  Placing placing{parsed, named, dict, header, std::vector<SeenStates>(named.parameters.size()),
                  {},     {},    {}};
  dict.optimizers.resize(parsed.model_ranks());
  ListUneven(placing);
  ListSettings(placing);
  for (const NamedWeight& weight : named.weights) {
    if (parsed.stage == 0)
      placing.weights.emplace(std::pair(weight.parameter, weight.tp), weight.tensor);
  }
  for (const NamedGroup& group : named.groups) {
    if (parsed.stage > 0) {
      CKPT_RETURN_IF_ERROR(PlacePartitions(group, placing));
      continue;
    }
    const UnshardedOptimizer& optimizer = *parsed.model(group.mp).optimizer;
    const bool fused = optimizer.form == UnshardedOptimizer::Form::kFused;
    CKPT_RETURN_IF_ERROR(fused ? PlaceFused(group, optimizer, placing)
                               : PlaceWhole(group, optimizer, placing));
    AddToGroup(group.number, optimizer.groups, group, placing);
  }
  placing.momenta.AddTo(named, dict, header);
  return {};
}

}  // namespace ckptfs::deepspeed::native
