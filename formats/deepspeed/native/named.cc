// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/named.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "core/state/roles.h"
#include "formats/settle/settle.h"

namespace ckptfs::deepspeed::native {
namespace {

// The prefix of the names of one module of a pipeline: "3." of "3.norm.weight",
// "tied_modules.embed." of "tied_modules.embed.weight".
std::string ModuleOf(std::string_view name) {
  const size_t dot = name.find('.', name.starts_with(kTiedModules) ? kTiedModules.size() : 0);
  return dot == std::string_view::npos ? "" : std::string(name.substr(0, dot + 1));
}

bool IsPlaceholder(const FileTensor& tensor) { return tensor.shape() == Shape{0}; }

// "tied_modules.embed.weight" -> {"embed", "weight"}.
std::optional<std::pair<std::string, std::string>> SplitTied(std::string_view name) {
  if (!name.starts_with(kTiedModules)) return std::nullopt;
  name.remove_prefix(kTiedModules.size());
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  return std::pair(std::string(name.substr(0, dot)), std::string(name.substr(dot + 1)));
}

// The parameters that are being named, in the order in which they are met.
struct Draft {
  const TagFiles& files;
  const Parsed& parsed;
  Named out;
  StateDictNames spellings;
  std::vector<ParameterIndex> order;  // the model's, with repetitions
  std::set<std::string> unsaved;      // stage 3 has the slices of a parameter nowhere
};

Result<ParameterIndex> AddParameter(const std::string& name, Role role, uint32_t stage, uint32_t tp,
                                    const Shape& shape, Draft& draft) {
  Named& out = draft.out;
  const auto [at, added] =
      out.by_name.try_emplace(name, ParameterIndex{static_cast<uint32_t>(out.parameters.size())});
  if (added) {
    out.parameters.push_back(NamedParameter{name, role, {}, ExpertOf(name)});
    draft.spellings.Add(name);
  }
  auto& shapes = out[at->second].shapes[stage];
  shapes.resize(draft.parsed.tp);
  if (shapes[tp] && *shapes[tp] != shape) {
    return Fail(
        Error{ErrorCode::kInvalid, StrCat("shape ", ShapeToString(*shapes[tp]), " in one file and ",
                                          ShapeToString(shape), " in another of the same rank")}
            .OfParameter(name));
  }
  shapes[tp] = shape;
  return at->second;
}

// `stages` that held it; none: nothing tells.
Status AddWeight(const std::string& name, const FileTensor& tensor, std::set<uint32_t> stages,
                 uint32_t tp, bool buffer, Draft& draft) {
  Named& out = draft.out;
  std::optional<ParameterIndex> index = out.Find(name);
  const bool named = index && out[*index].role == Role::kTrainable;
  // Without param_shapes (stage 0) every parameter counts as trainable until the optimizer says.
  const Role role = buffer                             ? Role::kBuffer
                    : draft.parsed.stage == 0 || named ? Role::kTrainable
                                                       : Role::kFrozen;
  if (!(named && out[*index].expert)) {
    const bool anywhere = stages.empty();
    if (anywhere) stages.insert(0);
    for (const uint32_t stage : stages) {
      CKPT_ASSIGN_OR_RETURN(index, AddParameter(name, role, stage, tp, tensor.shape(), draft));
    }
    out[*index].anywhere = anywhere;
  } else if (out[*index].shapes.begin()->second[tp] != tensor.shape()) {
    return Fail(Error{ErrorCode::kInvalid, "another shape in its expert file"}.OfParameter(name));
  }
  draft.order.push_back(*index);
  out.weights.push_back(NamedWeight{*index, &tensor, tp});
  return {};
}

Status NameGroup(uint32_t mp, size_t number, std::optional<uint32_t> expert_rank,
                 const LocalExperts& experts, Draft& draft) {
  const Parsed& parsed = draft.parsed;
  NamedGroup group{mp, number, expert_rank, {}};
  for (const NamedShape& entry : parsed.model(mp).groups[number]) {
    std::string name = entry.name;
    if (expert_rank) {
      CKPT_ASSIGN_OR_RETURN(name, experts.Global(entry.name, *expert_rank));
    }
    CKPT_ASSIGN_OR_RETURN(
        const ParameterIndex index,
        AddParameter(name, Role::kTrainable, mp / parsed.tp, mp % parsed.tp, entry.shape, draft));
    group.parameters.push_back(index);
  }
  if (parsed.stage > 0) draft.out.groups.push_back(std::move(group));
  return {};
}

Status NameTrainable(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    const ModelStates& model = parsed.model(mp);
    if (parsed.stage > 0 && !model.has_shapes) {
      return Refuse(
          model.file,
          ": no param_shapes; the flat optimizer partitions cannot be told apart without");
    }
    const LocalExperts experts(model.groups);
    for (size_t g = 0; g < model.groups.size(); ++g) {
      const auto expert_ranks = parsed.ExpertRanks(mp, g);
      if (expert_ranks && parsed.tp > 1) {
        return Fail(ErrorCode::kUnsupported,
                    StrCat(model.file, ": native MoE together with tensor parallelism"));
      }
      if (!expert_ranks) CKPT_RETURN_IF_ERROR(NameGroup(mp, g, std::nullopt, experts, draft));
      for (uint32_t rank = 0; rank < expert_ranks.value_or(0); ++rank) {
        CKPT_RETURN_IF_ERROR(NameGroup(mp, g, rank, experts, draft));
      }
    }
  }
  for (const auto& [alias, stored] : parsed.model(0).shared) {
    if (draft.out.by_name.contains(alias)) continue;
    draft.out.aliases.emplace(alias, stored);
    draft.spellings.Add(alias);
  }
  return {};
}

// Stage 3 has slices of these in frozen_param_fragments.
Status NameFrozen(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  for (uint32_t mp = 0; mp < parsed.model_ranks() && parsed.stage == 3; ++mp) {
    for (const NamedShape& entry : parsed.model(mp).frozen) {
      CKPT_RETURN_IF_ERROR(AddParameter(entry.name, Role::kFrozen, mp / parsed.tp, mp % parsed.tp,
                                        entry.shape, draft));
    }
  }
  return {};
}

Status NameModule(uint32_t mp, Draft& draft) {
  const Parsed& parsed = draft.parsed;
  const ModelStates& model = parsed.model(mp);
  const std::set<std::string> buffers = BufferNames(model);
  std::map<std::pair<std::string, uint64_t>, const NamedTensor*> seen;  // storage, offset
  for (const NamedTensor& entry : model.module) {
    const std::string name = draft.spellings.Of(entry.name);
    if (draft.out.aliases.contains(name)) continue;
    const auto known = draft.out.Find(name);
    if (IsPlaceholder(entry.tensor) && parsed.stage == 3 && !buffers.contains(name)) {
      if (known) {
        draft.order.push_back(*known);
      } else {
        draft.unsaved.insert(name);
      }
      continue;
    }
    if (entry.tensor.elements() > 0) {
      const auto [at, first] =
          seen.try_emplace({entry.tensor.storage_key(), entry.tensor.storage_offset()}, &entry);
      if (!first && at->second->tensor.SameBytes(entry.tensor) && !known) {
        draft.out.aliases.emplace(name, draft.spellings.Of(at->second->name));
        continue;
      }
    }
    auto added = AddWeight(name, entry.tensor, {mp / parsed.tp}, mp % parsed.tp,
                           buffers.contains(name), draft);
    if (!added) return Fail(std::move(added).error().WithContext(model.file));
  }
  return {};
}

// Layers whose file holds a tied module: layer -> key, "" where two would fit.
std::map<uint32_t, std::string> MatchTiedLayers(const Draft& draft) {
  std::map<std::string, std::map<std::string, Shape>> modules;  // key -> local name -> shape
  for (const NamedParameter& known : draft.out.parameters) {
    const auto parts = SplitTied(known.name);
    const auto& shape = known.shapes.begin()->second[0];
    if (parts && shape) modules[parts->first][parts->second] = *shape;
  }
  std::map<uint32_t, std::string> matches;
  std::map<std::string, std::vector<uint32_t>> by_key;
  for (const auto& [key, dict] : draft.parsed.layers) {
    if (key.tp != 0) continue;
    std::map<std::string, Shape> own;
    for (const NamedTensor& entry : dict.tensors) {
      const std::string full = draft.spellings.Of(StrCat(key.layer, ".", entry.name));
      if (!draft.out.by_name.contains(full)) own[entry.name] = entry.tensor.shape();
    }
    if (own.size() != dict.tensors.size() || own.empty()) continue;
    for (const auto& [tied, shapes] : modules) {
      const bool fits = std::all_of(shapes.begin(), shapes.end(), [&](const auto& entry) {
        const auto found = own.find(entry.first);
        return found != own.end() && found->second == entry.second;
      });
      if (fits) by_key[tied].push_back(key.layer);
    }
  }
  for (const auto& [tied, layers] : by_key) {
    for (uint32_t layer : layers) {
      const bool clear = layers.size() == 1 && !matches.contains(layer);
      matches[layer] = clear ? tied : "";
    }
  }
  return matches;
}

// The pipeline stages whose model states list a name, and those that list any
// name of its module: layer files do not say which stage wrote them.
std::map<std::string, std::set<uint32_t>> StagesOfNames(const Parsed& parsed) {
  std::map<std::string, std::set<uint32_t>> out;
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    const ModelStates& model = parsed.model(mp);
    std::set<std::string> names = BufferNames(model);
    for (const auto& group : model.groups) {
      for (const NamedShape& entry : group) names.insert(entry.name);
    }
    for (const NamedShape& entry : model.frozen) names.insert(entry.name);
    for (const std::string& name : names) {
      out[name].insert(mp / parsed.tp);
      if (const std::string module = ModuleOf(name); !module.empty()) {
        out[module].insert(mp / parsed.tp);
      }
    }
  }
  return out;
}

Status NameLayers(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  const std::map<std::string, std::set<uint32_t>> stages = StagesOfNames(parsed);
  const std::map<uint32_t, std::string> tied = MatchTiedLayers(draft);
  std::set<std::string> buffers;
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp)
    buffers.merge(BufferNames(parsed.model(mp)));
  for (const auto& [key, dict] : parsed.layers) {
    const std::string& file = draft.files.names.layers.at(key);
    const std::string path = draft.files.PathOf(file);
    if (key.tp >= parsed.tp) {
      return Refuse(path, ": its tensor-parallel rank is not below ", parsed.tp);
    }
    const auto match = tied.find(key.layer);
    if (match != tied.end() && match->second.empty()) {
      draft.out.notes.push_back(
          StrCat(file,
                 ": could belong to any of several tied modules; their weights are shown as their "
                 "masters cast"));
      continue;
    }
    const std::string prefix =
        match == tied.end() ? StrCat(key.layer, ".") : StrCat(kTiedModules, match->second, ".");
    for (const NamedTensor& entry : dict.tensors) {
      const std::string full = draft.spellings.Of(prefix + entry.name);
      auto held = stages.find(full);
      if (held == stages.end()) held = stages.find(prefix);
      const bool buffer = buffers.contains(full) ||
                          (!parsed.model(0).names_buffers &&
                           LooksLikeBuffer(full, entry.tensor.dtype(), entry.tensor.shape(), {}));
      auto added =
          AddWeight(full, entry.tensor, held == stages.end() ? std::set<uint32_t>() : held->second,
                    key.tp, buffer, draft);
      if (!added) return Fail(std::move(added).error().WithContext(path));
    }
  }
  return {};
}

Status NameExpertFiles(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  for (const auto& [key, dict] : parsed.experts) {
    const std::string path = draft.files.PathOf(draft.files.names.experts.at(key));
    if (key.mp >= parsed.model_ranks()) {
      return Refuse(path, ": its model-parallel rank is not below ", parsed.model_ranks());
    }
    for (const NamedTensor& entry : dict.tensors) {
      auto added = AddWeight(entry.name, entry.tensor, {key.mp / parsed.tp}, key.mp % parsed.tp,
                             false, draft);
      if (!added) return Fail(std::move(added).error().WithContext(path));
    }
  }
  return {};
}

// Groups of native experts may be spread over different numbers of ranks, and a layout has one.
void NoteExpertDegrees(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  std::set<uint32_t> degrees;
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    for (size_t g = 0; g < parsed.model(mp).groups.size(); ++g) {
      if (const auto ranks = parsed.ExpertRanks(mp, g)) degrees.insert(*ranks);
    }
  }
  if (degrees.size() < 2) return;
  std::string each;
  for (const uint32_t degree : degrees) each += StrCat(each.empty() ? "" : ", ", degree);
  draft.out.left_out.push_back({LeftOutPart::kModel,
                                StrCat("the layers' own expert-parallel degrees (", each, ")"),
                                "a layout has one degree for all layers, so no rank's files are "
                                "those of such an engine, and "
                                "it cannot load deepspeed/",
                                "load into an engine whose layers have one ep_size"});
}

// Without ZeRO a pipeline's files do not name what its stages share.  If its optimizers have more
// than the layers' files do, there is something.
void NoteUnnamedTies(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  if (parsed.stage != 0 || parsed.model(0).has_module || parsed.layers.empty()) return;
  uint64_t stored = 0;
  uint64_t stored_elements = 0;
  for (const auto& [key, dict] : parsed.layers) {
    if (key.tp != 0) continue;
    stored += dict.tensors.size();
    for (const NamedTensor& entry : dict.tensors) stored_elements += entry.tensor.elements();
  }
  uint64_t trained = 0;
  uint64_t trained_elements = 0;  // of flat groups
  for (uint32_t mp = 0; mp < parsed.model_ranks(); mp += parsed.tp) {
    const auto& optimizer = parsed.model(mp).optimizer;
    if (!optimizer) continue;
    for (const HyperGroup& group : optimizer->groups) trained += group.members.size();
    for (const FileTensor& flat : optimizer->flat_masters) trained_elements += flat.elements();
  }
  if (trained <= stored && trained_elements <= stored_elements) return;
  draft.out.left_out.push_back(
      {LeftOutPart::kModel, "the names of what the pipeline's stages share (tied_modules)",
       "without ZeRO no file has them; the weights are shown under the number of a layer, and an "
       "engine of a pipeline cannot load deepspeed/",
       ""});
}

// Entries of modules that are not tensors at all, and parameters without values; no view has a
// place for them.
void NoteLeftOut(Draft& draft) {
  const Parsed& parsed = draft.parsed;
  std::set<std::string> names;
  for (const auto& [key, model] : parsed.models) {
    names.insert(model.left_out.begin(), model.left_out.end());
  }
  for (const auto& [key, dict] : parsed.layers) {
    for (const std::string& name : dict.left_out) names.insert(StrCat(key.layer, ".", name));
  }
  for (const auto& [key, dict] : parsed.experts) {
    names.insert(dict.left_out.begin(), dict.left_out.end());
  }
  if (!names.empty()) draft.out.left_out.push_back(LeftOutEntries(names));
  if (draft.unsaved.empty()) return;
  draft.out.left_out.push_back(
      {LeftOutPart::kModel, StrCat("parameter '", *draft.unsaved.begin(), "'"),
       "it is in no group of the optimizer and not frozen, and DeepSpeed saves no values of such "
       "a parameter at ZeRO 3",
       "a strict load fails without it: load with strict=False (load_module_strict=False)",
       draft.unsaved.size() - 1});
}

// From the order in which parameters were met to the model's, which modules and
// layer files tell; what neither has comes last, by name.
void PutInOrder(Draft& draft) {
  Named& out = draft.out;
  for (const auto& [name, index] : out.by_name) draft.order.push_back(index);
  std::vector<std::optional<ParameterIndex>> to(out.parameters.size());
  std::vector<NamedParameter> ordered;
  ordered.reserve(out.parameters.size());
  for (const ParameterIndex from : draft.order) {
    auto& place = to[static_cast<uint32_t>(from)];
    if (place) continue;
    place = ParameterIndex{static_cast<uint32_t>(ordered.size())};
    ordered.push_back(std::move(out[from]));
  }
  out.parameters = std::move(ordered);
  const auto move = [&](ParameterIndex& index) { index = *to[static_cast<uint32_t>(index)]; };
  for (auto& [name, index] : out.by_name) move(index);
  for (NamedWeight& weight : out.weights) move(weight.parameter);
  for (NamedGroup& group : out.groups) {
    for (ParameterIndex& index : group.parameters) move(index);
  }
}

DType CommonDType(const Draft& draft) {
  const Named& out = draft.out;
  const ModelStates& model = draft.parsed.model(0);
  std::map<DType, uint64_t> counts;
  const auto count = [&](ParameterIndex index, const FileTensor& tensor) {
    if (out[index].role == Role::kTrainable) ++counts[tensor.dtype()];
  };
  // Placeholders of stage 3 tell it, too.
  for (const NamedTensor& entry : model.module) {
    if (const auto known = out.Find(draft.spellings.Of(entry.name))) count(*known, entry.tensor);
  }
  for (const NamedWeight& weight : out.weights) count(weight.parameter, *weight.tensor);
  // Where nothing tells it there are no weights either, only masters.
  const auto configured = DTypeFromName(model.config_dtype);
  return MostCommon(counts, configured).value_or(DType::kF32);
}

}  // namespace

uint32_t NamedParameter::PlaceOf(uint32_t stage) const {
  const auto found = shapes.find(stage);
  CKPT_CHECK(found != shapes.end());
  return static_cast<uint32_t>(std::distance(shapes.begin(), found));
}

const Shape* NamedParameter::ShapeOn(uint32_t stage, uint32_t tp) const {
  const auto found = shapes.find(stage);
  return found != shapes.end() && found->second[tp] ? &*found->second[tp] : nullptr;
}

std::optional<ParameterIndex> Named::Find(std::string_view name) const {
  const auto found = by_name.find(name);
  return found == by_name.end() ? std::nullopt : std::optional(found->second);
}

std::set<std::string> BufferNames(const ModelStates& model) {
  std::set<std::string> out;
  for (const std::string& name : model.buffers) {
    out.insert(name);
    out.insert(InStateDict(name));
  }
  return out;
}

Result<Named> Name(const TagFiles& files, const Parsed& parsed) {
  Draft draft{files, parsed, {}, {}, {}, {}};
  CKPT_RETURN_IF_ERROR(NameTrainable(draft));
  CKPT_RETURN_IF_ERROR(NameFrozen(draft));
  for (uint32_t mp = 0; mp < parsed.model_ranks(); ++mp) {
    CKPT_RETURN_IF_ERROR(NameModule(mp, draft));
  }
  CKPT_RETURN_IF_ERROR(NameLayers(draft));
  CKPT_RETURN_IF_ERROR(NameExpertFiles(draft));
  NoteLeftOut(draft);
  NoteExpertDegrees(draft);
  NoteUnnamedTies(draft);
  PutInOrder(draft);
  if (parsed.stage == 0) {
    CKPT_RETURN_IF_ERROR(NameUnsharded(files, parsed, draft.spellings, draft.out));
  }
  draft.out.model_dtype = CommonDType(draft);
  return std::move(draft.out);
}

}  // namespace ckptfs::deepspeed::native
