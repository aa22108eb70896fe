// SPDX-License-Identifier: Apache-2.0
//
// NativeReader: how parameters are sharded, and the weights under their atoms.

#include <algorithm>
#include <charconv>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/ingest/model_config.h"
#include "formats/deepspeed/native_reader.h"

namespace ckptfs::deepspeed {
namespace {

constexpr size_t kNamesShown = 5;

// The layer of a pipeline name "L.rest".
std::optional<uint32_t> PipelineLayer(std::string_view name) {
  uint32_t layer = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const bool dotted = error == std::errc() && end < name.data() + name.size() && *end == '.';
  return dotted && layer < (1u << 20) ? std::optional(layer) : std::nullopt;
}

// Names under the reason why nothing says how they are spread.
using OpenNames = std::map<std::string, std::vector<std::string>>;

Error Uncovered(const OpenNames& open, uint32_t tp) {
  std::string list;
  for (const auto& [why, names] : open) {
    list += list.empty() ? "" : "; ";
    for (size_t i = 0; i < std::min(kNamesShown, names.size()); ++i) {
      list += StrCat(i == 0 ? "" : ", ", "'", names[i], "'");
    }
    list += StrCat(names.size() > kNamesShown ? StrCat(", ... (", names.size(), " in all)") : "",
                   ": ", why);
  }
  return Error{ErrorCode::kUnsupported,
               StrCat("nothing says how these are spread over the ", tp, " tensor-parallel ranks: ",
                      list, ".  Settle it with --family-set NAME=NUMBER (a size that a rule needs), "
                      "--replicated REGEX, --averaged REGEX, or a rule of your own (--family FILE)")};
}

}  // namespace

Result<std::vector<Shape>> NativeReader::LocalShapes(const std::string& name,
                                                     const Known& known) const {
  std::vector<Shape> out;
  const auto& first = known.shapes.begin()->second;
  for (uint32_t tp = 0; tp < tp_; ++tp) {
    if (!first[tp]) {
      return Fail(ErrorCode::kInvalid, StrCat("'", name, "': tensor-parallel rank ", tp,
                                              " has no such parameter, other ranks do"));
    }
    out.push_back(*first[tp]);
  }
  for (const auto& [stage, shapes] : known.shapes) {
    if (shapes != first) {
      return Fail(ErrorCode::kInvalid, StrCat("'", name, "' has other shapes on pipeline stage ",
                                              stage, " than on ", known.shapes.begin()->first));
    }
  }
  return out;
}

Status NativeReader::DeclareParameter(const std::string& name, Known& known, bool layers_by_name) {
  Parameter parameter;
  parameter.name = name;
  parameter.shape = known.sharding.shape;
  parameter.role = known.role;
  parameter.pattern = known.sharding.pattern;
  parameter.source_pattern = known.sharding.source_pattern;
  parameter.stage = known.sharding.stage;
  parameter.layer = known.sharding.layer.value_or(0);
  parameter.expert = known.sharding.expert;
  parameter.expert_at = known.sharding.expert_at;
  if (known.expert) {
    parameter.expert = known.expert->number;
    parameter.expert_at = known.expert->at;
  }
  parameter.stacked_experts = known.sharding.stacked_experts;
  if (known.expert && parameter.pattern.kind == PatternKind::kUnknown) {
    parameter.pattern.kind = PatternKind::kUnique;
  }
  const auto layer = layers_by_name ? PipelineLayer(name) : std::nullopt;
  if (layer) {
    parameter.stage = StageRule::kLayer;
    parameter.layer = *layer;
    assembler_.header().layers = std::max(assembler_.header().layers, *layer + 1);
  } else if (layers_by_name && name.starts_with("tied_modules.")) {
    parameter.stage = StageRule::kFirstLast;
  }
  CKPT_ASSIGN_OR_RETURN(known.index, assembler_.AddParameter(std::move(parameter)));
  for (const auto& [stage, shapes] : known.shapes) {
    known.slots.emplace(stage, static_cast<uint32_t>(known.slots.size()));
  }
  // DeepSpeed itself ties these over the stages.
  if (name.starts_with("tied_modules.")) known.sharding.on_several_stages = true;
  return {};
}

Status NativeReader::ResolveSharding() {
  const ModelStates& model = ModelOf(0);
  std::vector<NamedLocals> parameters;
  for (const std::string& name : order_) {
    CKPT_ASSIGN_OR_RETURN(std::vector<Shape> locals, LocalShapes(name, known_.at(name)));
    parameters.emplace_back(name, std::move(locals));
  }
  CKPT_ASSIGN_OR_RETURN(ModelSizes sizes,
                        SizesOf(model.variables, options_.variables, candidate_));
  CKPT_ASSIGN_OR_RETURN(const ShardingRules rules,
                        ShardingRules::Make(model.info ? &*model.info : nullptr, options_,
                                            std::move(parameters), std::move(sizes)));
  OpenNames uncovered;
  std::vector<std::string> assumed;
  bool layered = false;
  for (const std::string& name : order_) {
    Known& known = known_.at(name);
    CKPT_ASSIGN_OR_RETURN(const std::vector<Shape> locals, LocalShapes(name, known));
    CKPT_ASSIGN_OR_RETURN(auto sharding, rules.Resolve(name, locals, known.role == Role::kBuffer));
    if (!sharding && known.role == Role::kBuffer) {
      assumed.push_back(name);
      sharding = Sharding{.how = Sharding::How::kReplicas,
                          .pattern = Pattern::Replicate(),
                          .source_pattern = std::nullopt,
                          .shape = locals[0],
                          .locals = std::vector<LocalTensor>(tp_, WholeTensor(locals[0])),
                          .layer = std::nullopt,
                          .expert = std::nullopt};
    }
    if (sharding) {
      layered = layered || sharding->layer.has_value();
      known.sharding = *std::move(sharding);
    } else {
      uncovered[rules.WhyOpen(name)].push_back(name);
    }
  }
  if (!uncovered.empty()) return Fail(Uncovered(uncovered, tp_));
  StepModel& header = assembler_.header();
  rules.Describe(header);
  if (!assumed.empty()) {
    header.notes.push_back(StrCat(assumed.size(), " buffers that no rule covers (", assumed[0],
                                  " ...) are taken to be equal on all tensor-parallel ranks; "
                                  "`ckptfs verify` compares them"));
  }
  for (const std::string& name : order_) {
    CKPT_RETURN_IF_ERROR(
        DeclareParameter(name, known_.at(name), !files_.layers.empty() && !layered));
  }
  SetModelDType();
  return {};
}

void NativeReader::SetModelDType() {
  std::map<DType, uint64_t> counts;
  for (const NamedTensor& entry : ModelOf(0).module) {
    const auto known = known_.find(spellings_.Of(entry.name));
    if (known != known_.end() && known->second.role == Role::kTrainable) ++counts[entry.tensor.dtype()];
  }
  for (const Weight& weight : weights_) {
    if (known_.at(weight.name).role == Role::kTrainable) ++counts[weight.tensor.dtype()];
  }
  std::optional<DType> best = DTypeFromName(ModelOf(0).config_dtype);
  uint64_t most = 0;
  for (const auto& [dtype, count] : counts) {
    if (count > most) {
      best = dtype;
      most = count;
    }
  }
  // Where nothing tells it there are no weights either, only masters.
  assembler_.header().model_dtype = best.value_or(DType::kF32);
}

Result<NativeReader::Place> NativeReader::PlaceIn(const std::string& name, std::string_view kind,
                                                  DType dtype, uint32_t slot, uint32_t tp) {
  const Known& known = known_.at(name);
  CKPT_ASSIGN_OR_RETURN(
      const AtomIndex atom,
      assembler_.AddAtom(known.index, "", kind, dtype, known.sharding.shape, Relation::kSame));
  const bool whole_each = known.sharding.how == Sharding::How::kReplicas ||
                          known.sharding.how == Sharding::How::kAverage;
  if (known.sharding.how == Sharding::How::kReplicas) assembler_.DeclareReplicas(atom);
  if (known.sharding.how == Sharding::How::kAverage) {
    if (slot > 0) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat("'", name, "' is averaged and on several pipeline stages"));
    }
    assembler_.DeclareAverage(atom);
  }
  if (slot > 0 && known.sharding.on_several_stages) assembler_.DeclareReplicas(atom);
  Place place{atom, whole_each ? slot * tp_ + tp : slot, 0};
  const auto [at, added] = locals_.try_emplace({static_cast<uint32_t>(atom), place.copy, tp}, 0);
  if (added) at->second = assembler_.AddLocal(atom, place.copy, known.sharding.locals[tp]);
  place.local = at->second;
  return place;
}

Status NativeReader::PlaceTensor(const std::string& name, std::string_view kind,
                                 const FileTensor& tensor, uint32_t slot, uint32_t tp) {
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceIn(name, kind, tensor.dtype(), slot, tp));
  auto held = tensor.As(known_.at(name).sharding.locals[tp]);
  if (!held) {
    return Fail(std::move(held).error().WithContext(
        StrCat(assembler_.blob(tensor.blob()).path, ": '", name, "' (", kind, ")")));
  }
  assembler_.SetLocal(place.atom, place.copy, place.local, std::move(held->local));
  assembler_.AddFragment(place.atom, place.copy, place.local, held->fragment);
  return {};
}

Status NativeReader::PlaceWeights() {
  for (const Weight& weight : weights_) {
    const uint32_t slot = known_.at(weight.name).weights[weight.tp]++;
    CKPT_RETURN_IF_ERROR(PlaceTensor(weight.name, "weight", weight.tensor, slot, weight.tp));
  }
  return {};
}

// Stage 3 keeps a frozen parameter as one flat slice per data-parallel rank.
Status NativeReader::PlaceFrozenFragments() {
  for (const auto& [key, model] : models_) {
    if (stage_ != 3) break;
    for (const NamedTensor& entry : model.frozen_fragments) {
      const std::string& name = entry.name;
      const auto known = known_.find(name);
      if (known == known_.end() || known->second.role != Role::kFrozen) {
        return Fail(ErrorCode::kInvalid, StrCat(model.file, ": frozen_param_fragments has '",
                                                entry.name, "', frozen_param_shapes has not"));
      }
      if (known->second.weights.count(key.mp % tp_) > 0) continue;  // whole in the module
      const auto& shapes = known->second.shapes.at(key.mp / tp_);
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(*shapes[key.mp % tp_]));
      const uint64_t slice = CeilDiv(elements, dp_);
      const uint64_t begin = std::min(elements, key.dp * slice);
      const uint64_t end = std::min(elements, begin + slice);
      CKPT_ASSIGN_OR_RETURN(
          const Place place, PlaceIn(name, "weight", entry.tensor.dtype(),
                                     known->second.slots.at(key.mp / tp_), key.mp % tp_));
      auto fragment = entry.tensor.Slice(0, begin, end);
      if (!fragment || entry.tensor.elements() != slice || entry.tensor.shape().size() != 1) {
        return Fail(ErrorCode::kInvalid,
                    StrCat(model.file, ": the fragment of frozen '", entry.name, "' has shape ",
                           ShapeToString(entry.tensor.shape()),
                           entry.tensor.dense() ? "" : " and is not contiguous",
                           "; a slice has ", slice, " elements"));
      }
      assembler_.AddFragment(place.atom, place.copy, place.local, *fragment);
    }
  }
  return {};
}

Status NativeReader::SetScalar(const std::string& name, const NamedScalar& scalar) {
  CKPT_ASSIGN_OR_RETURN(
      const AtomIndex atom,
      assembler_.AddAtom(known_.at(name).index, "", scalar.name, scalar.value.dtype,
                         scalar.value.shape, Relation::kScalar));
  return assembler_.SetInline(atom, scalar.value.bytes, scalar.value.python_number);
}

Status NativeReader::DeriveWeights() {
  size_t derived = 0;
  const std::optional<DType> dtype = assembler_.header().model_dtype;
  for (const std::string& name : order_) {
    const Known& known = known_.at(name);
    if (known.role != Role::kTrainable || !known.weights.empty()) continue;
    if (!known.master || !dtype) {
      return Fail(ErrorCode::kInvalid, StrCat("'", name, "': neither a weight nor a master of it is "
                                              "in any file"));
    }
    CKPT_ASSIGN_OR_RETURN(
        const AtomIndex weight,
        assembler_.AddAtom(known.index, "", "weight", *dtype, known.sharding.shape));
    CKPT_RETURN_IF_ERROR(assembler_.SetCast(weight, *known.master));
    ++derived;
  }
  if (derived > 0) {
    assembler_.header().notes.push_back(
        StrCat(derived, " weights are not stored; they are shown as their masters cast to ",
               DTypeName(*dtype)));
  }
  return {};
}

}  // namespace ckptfs::deepspeed
