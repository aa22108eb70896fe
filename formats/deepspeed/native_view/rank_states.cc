// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native_view/rank_states.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/view/shard.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/deepspeed/engine_dict.h"
#include "formats/deepspeed/universal/universal_info.h"
#include "formats/optimizer/hyper_parameters.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {
namespace {

using Items = std::vector<std::pair<NodeId, NodeId>>;

// ---- model states

class ModelWriter {
 public:
  ModelWriter(const ShownState& shown, const TargetEngine& engine,
              std::span<const FlatGroup> groups, const RankCoordinate& rank)
      : shown_(shown), step_(shown.step()), engine_(engine), groups_(groups), rank_(rank) {}

  Result<ArchiveContent> Write() && {
    DictBuilder dict(archive_);
    CKPT_RETURN_IF_ERROR(SetModule(dict));
    dict.Set("optimizer", pickle().None());
    SetShapes(dict);
    CKPT_RETURN_IF_ERROR(SetFrozen(dict));
    Items shared;
    for (const Alias& alias : shown_.aliases()) {
      shared.emplace_back(pickle().String(alias.name),
                          pickle().String(shown_.NameOf(alias.parameter)));
    }
    dict.Set("shared_params", pickle().Dict(shared));
    const Document* source_info = step_.FindDocument("client/universal_checkpoint_info");
    CKPT_ASSIGN_OR_RETURN(const NodeId info, UniversalInfo(shown_, source_info, archive_));
    const uint32_t source = SourceRankOf(step_, rank_.tp, engine_.tp);
    CKPT_RETURN_IF_ERROR(SetEngineState(shown_, source, info, archive_, dict));
    return std::move(archive_).Finish(std::move(dict).Finish());
  }

 private:
  PickleBuilder& pickle() { return archive_.pickle(); }

  // The entry in module of a parameter of which every rank has a slice.
  Result<NodeId> Placeholder(DType dtype) {
    const auto known = placeholders_.find(dtype);
    if (known != placeholders_.end()) return known->second;
    CKPT_ASSIGN_OR_RETURN(const NodeId empty, archive_.Tensor(dtype, Shape{0}, {}));
    return placeholders_.emplace(dtype, empty).first->second;
  }

  Status SetModule(DictBuilder& dict) {
    Items module;
    std::vector<NodeId> buffers;
    std::map<ParameterIndex, NodeId> values;
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      const ParameterIndex index{i};
      const Role role = step_.parameters[i].role;
      if (!IsOfModel(step_.parameters[i])) continue;
      CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown_.WeightOf(index));
      const bool sliced = engine_.stage == 3 && role != Role::kBuffer;
      CKPT_ASSIGN_OR_RETURN(const NodeId value,
                            sliced ? Placeholder(weight.dtype)
                                   : LocalWeight(shown_, shown_.layout(), rank_, index, archive_));
      const NodeId name = pickle().String(shown_.NameOf(index));
      module.emplace_back(name, value);
      values.emplace(index, value);
      if (role == Role::kBuffer) buffers.push_back(name);
    }
    for (const Alias& alias : shown_.aliases()) {
      const auto value = values.find(alias.parameter);
      if (value == values.end()) continue;
      module.emplace_back(pickle().String(alias.name), value->second);
    }
    dict.Set("module", pickle().OrderedDict(module));
    dict.Set("buffer_names", pickle().List(std::move(buffers)));
    return {};
  }

  void SetShapes(DictBuilder& dict) {
    std::vector<NodeId> lists;
    for (const FlatGroup& group : groups_) {
      Items shapes;
      for (const FlatMember& member : group.members) {
        const NodeId name = pickle().String(shown_.NameOf(member.parameter));
        shapes.emplace_back(name, pickle().Size(member.local->shape));
      }
      lists.push_back(pickle().OrderedDict(shapes));
    }
    dict.Set("param_shapes", pickle().List(std::move(lists)));
  }

  // As DeepSpeed writes them: none at stage 1; then whole, at stage 3 this rank's slice.
  Status SetFrozen(DictBuilder& dict) {
    Items shapes;
    Items fragments;
    for (uint32_t i = 0; i < step_.parameters.size(); ++i) {
      const ParameterIndex index{i};
      if (step_.parameters[i].role != Role::kFrozen) continue;
      CKPT_ASSIGN_OR_RETURN(const auto local,
                            LocalOf(step_, shown_.layout(), rank_, step_.parameters[i]));
      const NodeId name = pickle().String(shown_.NameOf(index));
      shapes.emplace_back(name, pickle().Size(local->shape));
      CKPT_ASSIGN_OR_RETURN(const NodeId value, FrozenPart(index, local));
      fragments.emplace_back(name, value);
    }
    const bool said = engine_.stage > 1;
    dict.Set("frozen_param_shapes", said ? pickle().OrderedDict(shapes) : pickle().None());
    dict.Set("frozen_param_fragments", said ? pickle().OrderedDict(fragments) : pickle().None());
    return {};
  }

  Result<NodeId> FrozenPart(ParameterIndex index, const std::shared_ptr<const LocalTensor>& local) {
    if (engine_.stage == 1) return pickle().None();
    if (engine_.stage == 2) return LocalWeight(shown_, shown_.layout(), rank_, index, archive_);
    CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown_.WeightOf(index));
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(local->shape));
    const auto [begin, end] = ZeroRange(elements, rank_.dp, engine_.dp);
    return archive_.Tensor(weight.dtype, Shape{end - begin},
                           {{(end - begin) * ByteWidth(weight.dtype),
                             AtomSegment{weight.atom, local, begin, end, weight.dtype}}});
  }

  const ShownState& shown_;
  const StepModel& step_;
  const TargetEngine& engine_;
  const std::span<const FlatGroup> groups_;
  const RankCoordinate rank_;
  ArchiveBuilder archive_;
  std::map<DType, NodeId> placeholders_;
};

// ---- optimizer states

class OptimizerWriter {
 public:
  OptimizerWriter(const ShownState& shown, const TargetEngine& engine,
                  std::span<const FlatGroup> groups, const RankCoordinate& rank)
      : shown_(shown), step_(shown.step()), engine_(engine), groups_(groups) {
    for (const FlatGroup& group : groups) {
      partitions_.push_back(PartitionOf(group, engine, rank.dp));
    }
  }

  Result<ArchiveContent> Write() && {
    DictBuilder zero(archive_);
    CKPT_RETURN_IF_ERROR(engine_.stage == 3 ? SetStageThree(zero) : SetStagesOneAndTwo(zero));
    DictBuilder root(archive_);
    root.Set("optimizer_state_dict", std::move(zero).Finish());
    CKPT_RETURN_IF_ERROR(root.SetDocument(kDsConfig, step_.FindDocument(kDsConfig)));
    CKPT_RETURN_IF_ERROR(SetVersion(step_, archive_, root));
    return std::move(archive_).Finish(std::move(root).Finish());
  }

 private:
  PickleBuilder& pickle() { return archive_.pickle(); }
  NodeId Number(uint64_t value) { return pickle().Int(static_cast<int64_t>(value)); }

  Status SetStagesOneAndTwo(DictBuilder& zero) {
    CKPT_RETURN_IF_ERROR(SetScale(zero));
    CKPT_RETURN_IF_ERROR(zero.SetDocument("clip_grad", step_.FindDocument(kClipGrad)));
    CKPT_ASSIGN_OR_RETURN(const NodeId base, BaseOptimizer());
    zero.Set("base_optimizer_state", base);
    CKPT_ASSIGN_OR_RETURN(const NodeId masters, Masters());
    zero.Set("single_partition_of_fp32_groups", masters);
    std::vector<NodeId> paddings;
    std::vector<NodeId> counts;
    std::vector<NodeId> alignments;  // a zero for each parameter
    for (size_t i = 0; i < groups_.size(); ++i) {
      paddings.push_back(Number(partitions_[i].padding));
      counts.push_back(Number(engine_.dp));
      const std::vector<NodeId> none(groups_[i].members.size(), Number(0));
      alignments.push_back(pickle().List(none));
    }
    zero.Set("zero_stage", uint64_t{engine_.stage});
    zero.Set("group_paddings", pickle().List(std::move(paddings)));
    if (!engine_.aligns) {
      zero.Set("param_alignment_paddings", pickle().List(std::move(alignments)));
    }
    zero.Set("partition_count", pickle().List(std::move(counts)));
    CKPT_RETURN_IF_ERROR(SetVersion(step_, archive_, zero));
    zero.Set("param_slice_mappings", SliceMappings());
    return {};
  }

  Status SetStageThree(DictBuilder& zero) {
    zero.Set("zero_stage", uint64_t{engine_.stage});
    CKPT_RETURN_IF_ERROR(SetScale(zero));
    zero.Set("partition_count", uint64_t{engine_.dp});
    CKPT_ASSIGN_OR_RETURN(const NodeId base, BaseOptimizer());
    zero.Set("optimizer_state_dict", base);
    CKPT_ASSIGN_OR_RETURN(const NodeId masters, Masters());
    zero.Set("fp32_flat_groups", masters);
    return {};
  }

  // An engine at ZeRO 3 asks for all three, those below keep their own.
  Status SetScale(DictBuilder& zero) {
    if (!ScalesAnew(shown_)) {
      CKPT_RETURN_IF_ERROR(zero.SetDocument("loss_scaler", step_.FindDocument(kLossScaler)));
      if (zero.Has("loss_scaler")) {
        const Document* dynamic = step_.FindDocument(kDynamicLossScale);
        CKPT_RETURN_IF_ERROR(zero.SetDocument("dynamic_loss_scale", dynamic));
        CKPT_RETURN_IF_ERROR(zero.SetDocument("overflow", step_.FindDocument(kOverflow)));
      }
    }
    if (engine_.stage != 3) return {};
    // fp16 alone is scaled, and has a scale of its own (CheckScale).
    const NodeId scaler = pickle().Global("deepspeed.runtime.fp16.loss_scaler", "LossScaler");
    const NodeId state = pickle().Dict({{pickle().String("cur_scale"), pickle().Float(1.0)},
                                        {pickle().String("dynamic"), pickle().Bool(false)}});
    zero.Set("loss_scaler", pickle().Object(scaler, pickle().Tuple({}), state));
    zero.Set("dynamic_loss_scale", pickle().Bool(false));
    zero.Set("overflow", pickle().Bool(false));
    return {};
  }

  // {state: {partition: states}, param_groups: [{..., params: [partitions]}]}
  Result<NodeId> BaseOptimizer() {
    Items state;
    std::map<size_t, std::vector<NodeId>> members;  // partitions by optimizer's group
    for (size_t i = 0; i < groups_.size(); ++i) {
      const NodeId number = Number(i);
      members[groups_[i].number].push_back(number);
      CKPT_ASSIGN_OR_RETURN(const auto states, StatesOf(i));
      if (states) state.emplace_back(number, *states);
    }
    std::vector<NodeId> groups;
    for (size_t g = 0; g < engine_.groups.size(); ++g) {
      CKPT_ASSIGN_OR_RETURN(Items items, HyperParametersOf(g));
      const NodeId params = pickle().String("params");
      items.emplace_back(params, pickle().List(std::move(members[g])));
      groups.push_back(pickle().Dict(items));
    }
    const NodeId listed = pickle().List(std::move(groups));
    return pickle().Dict({{pickle().String("state"), pickle().Dict(state)},
                          {pickle().String("param_groups"), listed}});
  }

  Result<Items> HyperParametersOf(size_t group) {
    Items items;
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree,
                          RecordedHyperParameters(*shown_.groups()[group].recorded));
    const PickleRef dict = RootOf(tree);
    for (const auto& [key, value] : dict.Items()) {
      const auto name = key.String();
      if (name == "params") continue;
      const NodeId shown = pickle().Copy(key);
      items.emplace_back(shown, pickle().Copy(value));
    }
    return items;
  }

  // The states of a partition; nothing of a group that has none yet.
  Result<std::optional<NodeId>> StatesOf(size_t i) {
    const auto& kinds = shown_.groups()[groups_[i].number].kinds;
    if (kinds.empty()) return std::optional<NodeId>();
    Items items;
    for (const auto& [kind, first] : kinds) {
      NodeId value = 0;
      if (step_.atom(first).relation == Relation::kScalar) {
        CKPT_ASSIGN_OR_RETURN(value, archive_.Scalar(step_, first));
      } else {
        CKPT_ASSIGN_OR_RETURN(value, Flat(i, kind, partitions_[i].padding));
      }
      items.emplace_back(pickle().String(kind), value);
    }
    return std::optional(pickle().Dict(items));
  }

  // Without the padding, as ZeRO 1 and 2 save them; engines put it there again.
  Result<NodeId> Masters() {
    std::vector<NodeId> masters;
    for (size_t i = 0; i < groups_.size(); ++i) {
      CKPT_ASSIGN_OR_RETURN(const NodeId master, Flat(i, "master", 0));
      masters.push_back(master);
    }
    return pickle().List(std::move(masters));
  }

  // The atom of a member's state; nothing if it has none, and zeros stand for it.
  Result<std::optional<AtomIndex>> AtomOf(ParameterIndex parameter, std::string_view kind) const {
    std::optional<AtomIndex> found = step_.FindAtom(parameter, kind);
    if (found || kind != "master") return found;
    CKPT_ASSIGN_OR_RETURN(const ShownWeight weight, shown_.WeightOf(parameter));
    return std::optional(weight.atom);
  }

  // The type of all members; fp32 where they differ.
  Result<DType> DTypeOf(const FlatGroup& group, std::string_view kind) const {
    std::optional<DType> one;
    for (const FlatMember& member : group.members) {
      CKPT_ASSIGN_OR_RETURN(const auto atom, AtomOf(member.parameter, kind));
      if (!atom) continue;
      const Atom& stored = step_.atom(*atom);
      if (one && *one != stored.dtype) return DType::kF32;
      one = stored.kind == "weight" ? DType::kF32 : stored.dtype;
    }
    return one.value_or(DType::kF32);
  }

  Result<NodeId> Flat(size_t i, std::string_view kind, uint64_t padding) {
    CKPT_ASSIGN_OR_RETURN(const DType dtype, DTypeOf(groups_[i], kind));
    const uint64_t width = ByteWidth(dtype);
    std::vector<std::pair<uint64_t, SegmentBody>> parts;
    uint64_t elements = padding;
    const auto zeros = [&](uint64_t bytes) {
      if (bytes > 0) parts.emplace_back(bytes, ZeroSegment{bytes});
    };
    for (const auto& [member, begin, end] : partitions_[i].spans) {
      CKPT_ASSIGN_OR_RETURN(const auto atom, AtomOf(member->parameter, kind));
      elements += end - begin;
      const uint64_t bytes = (end - begin) * width;
      if (atom) {
        parts.emplace_back(bytes, AtomSegment{*atom, member->local, begin, end, dtype});
      } else {
        zeros(bytes);
      }
    }
    zeros(padding * width);
    return archive_.Tensor(dtype, Shape{elements}, std::move(parts));
  }

  // By group: {name: where the partition has how much of the parameter}.
  NodeId SliceMappings() {
    const NodeId address = pickle().Global("deepspeed.utils.tensor_fragment", "fragment_address");
    std::vector<NodeId> lists;
    for (const Partition& partition : partitions_) {
      Items slices;
      uint64_t start = 0;
      for (const FlatSpan& span : partition.spans) {
        const uint64_t elements = span.end - span.begin;
        const NodeId name = pickle().String(shown_.NameOf(span.member->parameter));
        const NodeId state = pickle().Dict({{pickle().String("numel"), Number(elements)},
                                            {pickle().String("start"), Number(start)}});
        slices.emplace_back(name, pickle().Object(address, pickle().Tuple({}), state));
        start += elements;
      }
      lists.push_back(pickle().OrderedDict(slices));
    }
    return pickle().List(std::move(lists));
  }

  const ShownState& shown_;
  const StepModel& step_;
  const TargetEngine& engine_;
  const std::span<const FlatGroup> groups_;
  ArchiveBuilder archive_;
  std::vector<Partition> partitions_;
};

}  // namespace

Result<ArchiveContent> ModelStatesOf(const ShownState& shown, const TargetEngine& engine,
                                     std::span<const FlatGroup> groups,
                                     const RankCoordinate& rank) {
  return ModelWriter(shown, engine, groups, rank).Write();
}

Result<ArchiveContent> OptimizerStatesOf(const ShownState& shown, const TargetEngine& engine,
                                         std::span<const FlatGroup> groups,
                                         const RankCoordinate& rank) {
  return OptimizerWriter(shown, engine, groups, rank).Write();
}

}  // namespace ckptfs::deepspeed
