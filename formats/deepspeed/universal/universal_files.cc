// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/universal/universal_files.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/base/strings.h"
#include "core/view/shard.h"
#include "formats/deepspeed/document_keys.h"
#include "formats/deepspeed/engine_dict.h"
#include "formats/deepspeed/universal/universal_cut.h"
#include "formats/deepspeed/universal/universal_info.h"
#include "formats/deepspeed/universal/universal_readers.h"
#include "formats/optimizer/hyper_parameters.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::deepspeed {
namespace {

// Groups that an engine has and the file lacks are silently not loaded, so empty
// ones follow the source's (an empty one changes no hyper-parameter).
constexpr size_t kParameterGroups = 64;

bool IsWeightsOnly(const StepModel& step) {
  return std::all_of(step.atoms.begin(), step.atoms.end(),
                     [&](const Atom& a) { return a.kind == "weight" || !step.IsOfModel(a); });
}

// For a step without an optimizer's states: the weights that a tensor-parallel
// rank holds, for load_checkpoint(load_module_only=True).
Status SetWeights(const ShownState& shown, uint32_t rank, ArchiveBuilder& archive,
                  PickleItems& module) {
  const StepModel& step = shown.step();
  Layout cut;
  cut.tp = shown.layout().tp;
  const RankCoordinate at = CoordinateOf(cut, rank);
  std::map<ParameterIndex, NodeId> values;
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    const ParameterIndex index{i};
    const auto& weight = shown.FindWeight(index);
    if (step.parameters[i].role == Role::kBuffer || !IsOfModel(step.parameters[i]) || !weight) {
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(const NodeId value, LocalWeight(shown, cut, at, index, archive));
    module.emplace_back(archive.pickle().String(shown.NameOf(index)), value);
    values.emplace(index, value);
  }
  for (const Alias& alias : shown.aliases()) {
    const auto value = values.find(alias.parameter);
    if (value == values.end()) continue;
    module.emplace_back(archive.pickle().String(alias.name), value->second);
  }
  return {};
}

// Buffers, which the universal loader never restores, for a caller that wants to
// load them by hand; they are small.
Status SetModule(const ShownState& shown, uint32_t rank, ArchiveBuilder& archive,
                 DictBuilder& dict) {
  const StepModel& step = shown.step();
  PickleItems module;
  std::vector<NodeId> buffer_names;
  if (IsWeightsOnly(step) && shown.layout().pp == 1) {
    CKPT_RETURN_IF_ERROR(SetWeights(shown, rank, archive, module));
  }
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    if (step.parameters[i].role != Role::kBuffer) continue;
    auto atom = step.FindAtom(ParameterIndex{i}, "weight");
    if (!atom) continue;
    const NodeId name = archive.pickle().String(shown.NameOf(ParameterIndex{i}));
    CKPT_ASSIGN_OR_RETURN(const NodeId value,
                          archive.WholeAtom(step, *atom, step.atom(*atom).dtype));
    module.emplace_back(name, value);
    buffer_names.push_back(name);
  }
  dict.Set("module", archive.pickle().OrderedDict(module));
  dict.Set("buffer_names", archive.pickle().List(std::move(buffer_names)));
  return {};
}

// The loader never restores frozen parameters and they may be the whole model,
// so only their shapes are told.
void SetFrozenShapes(const ShownState& shown, ArchiveBuilder& archive, DictBuilder& dict) {
  const StepModel& step = shown.step();
  PickleItems shapes;
  for (uint32_t i = 0; i < step.parameters.size(); ++i) {
    if (step.parameters[i].role != Role::kFrozen) continue;
    const NodeId name = archive.pickle().String(shown.NameOf(ParameterIndex{i}));
    shapes.emplace_back(name, archive.pickle().Size(step.parameters[i].shape));
  }
  if (shapes.empty()) return;
  dict.Set("frozen_param_shapes", archive.pickle().OrderedDict(shapes));
}

// The dict of a group's hyper-parameters; empty if nothing is known.
// ZeRO-1 in its elastic form saves none: the scheduler's last rate stands in,
// without which the first step would run at a fresh engine's warm-up rate.
Result<PickleTree> HyperParameters(const StepModel& step, size_t group) {
  const Document* scheduler = step.FindDocument(kLrScheduler);
  if (scheduler == nullptr || !step.groups[group].hyper_parameters.empty()) {
    return RecordedHyperParameters(step.groups[group]);
  }
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*scheduler));
  const PickleRef root = RootOf(tree);
  const PickleRef rates = root && root.IsDict() ? root["_last_lr"] : PickleRef();
  if (!rates || !rates.IsSequence() || rates.size() != step.groups.size()) {
    return RecordedHyperParameters(step.groups[group]);
  }
  PickleBuilder builder;
  const NodeId rate = builder.Copy(rates.at(group));
  const NodeId dict = builder.Dict({{builder.String("lr"), rate}});
  return std::move(builder).Finish(dict);
}

// One group's dict.  The names of expert groups say the source's ep size and
// the engine finds its process groups by them, so they stay the engine's own.
Result<PickleItems> GroupItems(const StepModel& step, size_t group, PickleBuilder& pickle,
                               const std::set<std::string>* only) {
  PickleItems items;
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, HyperParameters(step, group));
  const PickleRef dict = RootOf(tree);
  const bool experts = dict["moe"].Bool().value_or(false);
  for (const auto& [key, value] : dict.Items()) {
    const std::string name(key.String().value_or(""));
    if (name == "params" || (experts && name == "name")) continue;
    if (only != nullptr && !only->contains(name)) continue;
    const NodeId shown = pickle.Copy(key);
    items.emplace_back(shown, pickle.Copy(value));
  }
  return items;
}

// The keys that all groups share, and for each other key two groups that differ in it.
struct ComparedGroups {
  std::set<std::string> shared;
  std::map<std::string, std::pair<size_t, size_t>> differing;
};

Result<ComparedGroups> CompareGroups(const StepModel& step) {
  ComparedGroups out;
  std::map<std::string, std::pair<size_t, std::string>> first;  // the first group with the key
  for (size_t g = 0; g < step.groups.size(); ++g) {
    CKPT_ASSIGN_OR_RETURN(const PickleTree tree, HyperParameters(step, g));
    const PickleRef dict = RootOf(tree);
    for (const auto& [key, value] : dict.Items()) {
      PickleBuilder builder;
      const NodeId copy = builder.Copy(value);
      CKPT_ASSIGN_OR_RETURN(const std::string printed,
                            PrintPickle(std::move(builder).Finish(copy)));
      const std::string name(key.String().value_or(""));
      const auto [seen, added] = first.try_emplace(name, g, printed);
      if (added && g > 0) out.differing.try_emplace(name, 0, g);  // group 0 lacks it
      if (seen->second.second != printed) out.differing.try_emplace(name, seen->second.first, g);
    }
    for (const auto& [key, seen] : first) {
      if (!dict[key]) out.differing.try_emplace(key, seen.first, g);
    }
  }
  for (const auto& [key, seen] : first) {
    if (!out.differing.contains(key)) out.shared.insert(key);
  }
  return out;
}

// True if a flattened state dict says hyper-parameters by parameter, and does not say which
// parameters were one group of the optimizer.
bool IsFlattened(const StepModel& step) { return step.facts.keys && step.facts.keys->flat; }

Result<NodeId> ParamGroups(const StepModel& step, PickleBuilder& pickle) {
  std::vector<NodeId> groups;
  if (IsFlattened(step) && !step.groups.empty()) {  // keep what is true of every possible group
    CKPT_ASSIGN_OR_RETURN(const ComparedGroups compared, CompareGroups(step));
    CKPT_ASSIGN_OR_RETURN(const PickleItems items, GroupItems(step, 0, pickle, &compared.shared));
    const NodeId every = pickle.Dict(items);
    return pickle.List(std::vector<NodeId>(kParameterGroups, every));
  }
  for (size_t g = 0; g < step.groups.size(); ++g) {
    CKPT_ASSIGN_OR_RETURN(PickleItems items, GroupItems(step, g, pickle, nullptr));
    groups.push_back(pickle.Dict(items));
  }
  while (groups.size() < kParameterGroups) groups.push_back(pickle.Dict({}));
  return pickle.List(std::move(groups));
}

std::string FirstOf(const StepModel& step, size_t group) {
  const auto& members = step.groups.at(group).parameters;
  return members.empty() ? StrCat("group ", group)
                         : StrCat("'", step.parameter(members[0]).name, "'");
}

// {'state': {0: {'step': S}}, 'param_groups': [shared]} for the stage-3 loader.
Result<NodeId> StageThreeState(const ShownState& shown, const UniversalIndex& index,
                               ArchiveBuilder& archive) {
  const StepModel& step = shown.step();
  PickleBuilder& pickle = archive.pickle();
  PickleItems state;
  // Such an engine asks for the step.  Where it would lose a state of another name it gets none,
  // and fails instead.
  const bool loads = StageThreeLoads(shown);
  for (const UniversalParameter& parameter : index.parameters) {
    if (!loads) break;
    auto found = std::find_if(parameter.states.begin(), parameter.states.end(),
                              [](const UniversalState& s) { return s.file == "step"; });
    if (found == parameter.states.end() || found->atoms.empty()) continue;
    CKPT_ASSIGN_OR_RETURN(const NodeId value, archive.Scalar(step, found->atoms[0]));
    const NodeId first = pickle.Dict({{pickle.String("step"), value}});
    state.emplace_back(pickle.Int(0), first);
    break;
  }
  // The engine copies group 0's keys into every group: what all groups share.
  CKPT_ASSIGN_OR_RETURN(const ComparedGroups compared, CompareGroups(step));
  PickleItems items;
  if (!step.groups.empty()) {
    CKPT_ASSIGN_OR_RETURN(items, GroupItems(step, 0, pickle, &compared.shared));
  }
  const NodeId groups = pickle.List({pickle.Dict(items)});
  return pickle.Dict(
      {{pickle.String("state"), pickle.Dict(state)}, {pickle.String("param_groups"), groups}});
}

// Scalars of the ZeRO dict, but for what only describes the source's files.
Status SetZeroScalars(const ShownState& shown, DictBuilder& dict) {
  const StepModel& step = shown.step();
  const bool anew = ScalesAnew(shown);
  static const std::set<std::string_view> of_the_source = {
      "partition_count",           "group_paddings",
      "param_alignment_paddings",  "param_slice_mappings",
      "base_optimizer_state_step", "universal_checkpoint_info"};
  for (const Document& document : step.documents) {
    if (!document.key.starts_with(kZeroPrefix) || !document.scope.empty()) continue;
    const std::string_view key = std::string_view(document.key).substr(kZeroPrefix.size());
    if (anew && (document.key == kLossScaler || document.key == kDynamicLossScale)) continue;
    if (!of_the_source.contains(key)) CKPT_RETURN_IF_ERROR(dict.SetDocument(key, &document));
  }
  return {};
}

// The full tensor: the atoms one after the other along dim 0, or zeros.  fp32 as
// the stock converter writes it, for any float the source kept.
Result<NodeId> StateTensor(const StepModel& step, const Parameter& parameter,
                           const UniversalState& state, const Shape& shape,
                           ArchiveBuilder& archive) {
  DType dtype = DType::kF32;
  for (AtomIndex atom : state.atoms) {
    if (!IsFloat(step.atom(atom).dtype)) dtype = step.atom(atom).dtype;
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(parameter.shape));
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(parameter.shape, dtype));
  CKPT_ASSIGN_OR_RETURN(const uint64_t all_bytes, ByteCount(shape, dtype));
  const auto local = std::make_shared<const LocalTensor>(WholeTensor(parameter.shape));
  std::vector<std::pair<uint64_t, SegmentBody>> parts;
  for (AtomIndex atom : state.atoms) {
    parts.emplace_back(bytes, AtomSegment{atom, local, 0, elements, dtype});
  }
  if (parts.empty()) parts.emplace_back(all_bytes, ZeroSegment{all_bytes});
  return archive.Tensor(dtype, shape, std::move(parts));
}

}  // namespace

uint32_t SourceRank(const StepModel& step, const UniversalIndex& index, uint32_t rank) {
  return IsWeightsOnly(step) ? rank : SourceRankOf(step, rank, index.model_files);
}

Result<ArchiveContent> ModelStatesFile(const ShownState& shown, uint32_t source_rank) {
  const StepModel& step = shown.step();
  ArchiveBuilder archive;
  DictBuilder dict(archive);
  CKPT_RETURN_IF_ERROR(SetModule(shown, source_rank, archive, dict));
  SetFrozenShapes(shown, archive, dict);
  const Document* source_info = step.FindDocument("client/universal_checkpoint_info");
  CKPT_ASSIGN_OR_RETURN(const NodeId info, UniversalInfo(shown, source_info, archive));
  CKPT_RETURN_IF_ERROR(SetEngineState(shown, source_rank, info, archive, dict));
  return std::move(archive).Finish(std::move(dict).Finish());
}

Result<ArchiveContent> OptimizerState(const ShownState& shown, const UniversalIndex& index) {
  const StepModel& step = shown.step();
  ArchiveBuilder archive;
  DictBuilder dict(archive);
  CKPT_RETURN_IF_ERROR(SetZeroScalars(shown, dict));
  CKPT_RETURN_IF_ERROR(SetVersion(step, archive, dict));
  CKPT_ASSIGN_OR_RETURN(const NodeId groups, ParamGroups(step, archive.pickle()));
  dict.Set("param_groups", groups);
  CKPT_ASSIGN_OR_RETURN(const NodeId three, StageThreeState(shown, index, archive));
  dict.Set("optimizer_state_dict", three);
  return std::move(archive).Finish(std::move(dict).Finish());
}

Result<ArchiveContent> ParameterState(const ShownState& view, const UniversalParameter& shown,
                                      const UniversalState& state) {
  const StepModel& step = view.step();
  ArchiveBuilder archive;
  if (state.file == "step") {
    CKPT_ASSIGN_OR_RETURN(const NodeId value, archive.Scalar(step, state.atoms.at(0)));
    return std::move(archive).Finish(value);
  }
  const Parameter& parameter = step.parameter(shown.parameter);
  PickleBuilder& pickle = archive.pickle();
  Shape shape = parameter.shape;
  if (shown.expert_ranks > 0) shape[0] *= shown.expert_ranks;
  CKPT_ASSIGN_OR_RETURN(const NodeId tensor, StateTensor(step, parameter, state, shape, archive));
  PickleItems items;
  items.emplace_back(pickle.String("param"), tensor);
  const bool stacked = shown.expert_ranks > 0 || parameter.stacked_experts > 0;
  auto cut = CutOf(parameter);
  if (shape.empty()) {
    for (auto& item : KeysOfNumber(pickle)) items.push_back(item);
  } else if (cut && !stacked) {
    for (auto& item : CutKeys(*cut, shape, pickle)) items.push_back(item);
  }
  // The loader takes its ep rank's share of dim 0.  That of ZeRO 3 refuses the mark where the
  // engine's ranks do not share experts.
  if (stacked && (view.layout().zero != 3 || view.layout().ep > 1)) {
    items.emplace_back(pickle.String("is_expert_param"), pickle.Bool(true));
    items.emplace_back(pickle.String("ep_num_experts"), pickle.Int(static_cast<int64_t>(shape[0])));
  }
  return std::move(archive).Finish(pickle.Dict(items));
}

Result<std::string> HyperParametersLeftOut(const ShownState& shown) {
  const StepModel& step = shown.step();
  const bool flattened = IsFlattened(step);
  if (!flattened && shown.layout().zero != 3) return std::string();
  CKPT_ASSIGN_OR_RETURN(const ComparedGroups compared, CompareGroups(step));
  if (compared.differing.empty()) return std::string();
  std::map<std::pair<size_t, size_t>, std::string> keys;  // by who differs
  for (const auto& [key, groups] : compared.differing) {
    if (key == "params" || key == "name" || key == "moe") continue;  // say what a group is
    std::string& of_these = keys[groups];
    of_these += StrCat(of_these.empty() ? "" : ", ", "'", key, "'");
  }
  if (keys.empty()) return std::string();
  std::string text;
  for (const auto& [groups, of_these] : keys) {
    text += StrCat(text.empty() ? "" : "; ", of_these, ", different for ",
                   FirstOf(step, groups.first), " and ", FirstOf(step, groups.second));
  }
  return StrCat("hyper-parameters: ", text, "; ",
                flattened ? "the source has them by parameter and does not say which parameters "
                            "are one group"
                          : "a ZeRO-3 engine would take one value for all groups",
                ", so the engine keeps its own");
}

}  // namespace ckptfs::deepspeed
