// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/placed.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/check/stage_copies.h"
#include "core/state/model_config.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/settle/settle.h"
#include "formats/tools/model_files.h"

namespace ckptfs::deepspeed::native {
namespace {

// The tensors and slices that files have of a weight.
struct WeightParts {
  struct Slice {
    Fragment fragment;
    Holder holder;
  };
  std::vector<std::pair<const FileTensor*, Holder>> whole = {};  // a rank's
  std::vector<Slice> slices = {};
};
using Weights = std::vector<WeightParts>;  // by ParameterIndex

// A weight that several stages hold is met once for each.
Weights StoredWeights(const Named& named) {
  Weights out(named.parameters.size());
  std::map<std::pair<ParameterIndex, uint32_t>, uint32_t> met;  // by tp rank
  for (const auto& [parameter, tensor, tp] : named.weights) {
    out[static_cast<uint32_t>(parameter)].whole.emplace_back(tensor,
                                                             Holder{met[{parameter, tp}]++, tp});
  }
  return out;
}

// Stage 3 keeps a frozen parameter as one flat slice per data-parallel rank.
Status AddFrozen(const Parsed& parsed, const Named& named, Weights& weights) {
  for (const auto& [key, model] : parsed.models) {
    if (parsed.stage != 3) break;
    const uint32_t stage = key.mp / parsed.tp;
    const uint32_t tp = key.mp % parsed.tp;
    for (const auto& [name, tensor] : model.frozen_fragments) {
      const auto index = named.Find(name);
      const Shape* shape = index ? named[*index].ShapeOn(stage, tp) : nullptr;
      if (shape == nullptr || named[*index].role != Role::kFrozen) {
        return Refuse(model.file, ": frozen_param_fragments has '", name,
                      "', but frozen_param_shapes does not");
      }
      WeightParts& parts = weights[static_cast<uint32_t>(*index)];
      const bool in_module =
          std::ranges::any_of(parts.whole, [&](const auto& one) { return one.second.tp == tp; });
      if (in_module) continue;
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(*shape));
      const uint64_t slice = CeilDiv(elements, parsed.dp);
      const uint64_t begin = std::min(elements, key.dp * slice);
      const uint64_t end = std::min(elements, begin + slice);
      auto fragment = tensor.Slice(0, begin, end);
      if (!fragment || tensor.elements() != slice || tensor.shape().size() != 1) {
        return Refuse(model.file, ": the fragment of frozen '", name, "' has shape ",
                      ShapeToString(tensor.shape()), tensor.dense() ? "" : " and is not contiguous",
                      ", but a slice has ", slice, " elements");
      }
      parts.slices.push_back({*fragment, Holder{named[*index].PlaceOf(stage), tp}});
    }
  }
  return {};
}

PlaceParts PlaceWeight(WeightParts parts) {
  if (parts.whole.empty() && parts.slices.empty()) return nullptr;
  return [parts = std::move(parts)](Assembler& assembler, AtomParts& atom) -> Status {
    for (const auto& [tensor, holder] : parts.whole) {
      CKPT_RETURN_IF_ERROR(PlaceTensor(*tensor, holder)(assembler, atom));
    }
    for (const auto& [fragment, holder] : parts.slices) {
      CKPT_ASSIGN_OR_RETURN(const auto local, atom.Add(holder));
      atom.AddFragment(local, fragment);
    }
    return {};
  };
}

// The shapes that the tensor-parallel ranks hold, which are the same on each pipeline stage.
Result<std::vector<Shape>> LocalShapes(const NamedParameter& parameter, uint32_t ranks) {
  std::vector<Shape> out;
  const auto& [first_stage, first] = *parameter.shapes.begin();
  for (uint32_t tp = 0; tp < ranks; ++tp) {
    if (!first[tp]) {
      return Fail(Error{ErrorCode::kInvalid, StrCat("tensor-parallel rank ", tp,
                                                    " does not have this parameter, but other "
                                                    "ranks do")}
                      .OfParameter(parameter.name));
    }
    out.push_back(*first[tp]);
  }
  for (const auto& [stage, shapes] : parameter.shapes) {
    if (shapes == first) continue;
    return Fail(Error{ErrorCode::kInvalid, StrCat("it has other shapes on pipeline "
                                                  "stage ",
                                                  stage, " than on ", first_stage)}
                    .OfParameter(parameter.name));
  }
  return out;
}

// The layer of a pipeline name "L.rest".
std::optional<uint32_t> PipelineLayer(std::string_view name) {
  uint32_t layer = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), layer);
  const bool dotted = error == std::errc() && end < name.data() + name.size() && *end == '.';
  return dotted && layer < (1u << 20) ? std::optional(layer) : std::nullopt;
}

Status AddTensors(const TagFiles& files, const Parsed& parsed, const Named& named,
                  StateDict& dict) {
  Weights weights = StoredWeights(named);
  CKPT_RETURN_IF_ERROR(AddFrozen(parsed, named, weights));
  for (size_t i = 0; i < named.parameters.size(); ++i) {
    const NamedParameter& parameter = named.parameters[i];
    StateDict::Tensor& added = dict.tensors.emplace_back();
    CKPT_ASSIGN_OR_RETURN(added.ranks, LocalShapes(parameter, parsed.tp));
    added.name = parameter.name;
    added.shape = added.ranks[0];
    added.role = parameter.role;
    if (!weights[i].whole.empty()) added.dtype = weights[i].whole[0].first->dtype();
    if (!weights[i].slices.empty()) added.dtype = weights[i].slices[0].fragment.dtype;
    added.place = PlaceWeight(std::move(weights[i]));
    for (const auto& [stage, shapes] : parameter.shapes) {
      if (parsed.pp > 1 && !parameter.anywhere) added.stages.push_back(stage);
    }
    if (!files.names.layers.empty()) added.layer = PipelineLayer(parameter.name);
    added.tied = parameter.name.starts_with(kTiedModules);  // DeepSpeed itself keeps them equal
    added.expert = parameter.expert;
    if (parameter.expert) added.pattern.emplace().kind = PatternKind::kUnique;
  }
  return {};
}

// Parameters that more than one stage lists.
std::vector<ParameterIndex> OnSeveralStages(const Named& named) {
  std::vector<ParameterIndex> out;
  for (uint32_t i = 0; i < named.parameters.size(); ++i) {
    const NamedParameter& parameter = named.parameters[i];
    const bool several = parameter.shapes.size() > 1 && !parameter.anywhere;
    if (several && parameter.role == Role::kTrainable) out.push_back(ParameterIndex{i});
  }
  return out;
}

// The engine ties one attribute of a tied module; what else it has is each stage's own.
Status ChooseStages(const TagFiles& files, const Parsed& parsed, const Named& named,
                    StepModel& model) {
  if (parsed.pp < 2) return {};
  const std::vector<ParameterIndex> several = OnSeveralStages(named);
  if (several.empty()) return {};
  BlobReader::Options reading;
  if (!files.step.root->local()) {
    reading.open_roots = {{files.step.SavePath(), RootBelow(files.step.root, files.step.save)}};
  }
  const auto blobs = BlobReader::Create(model, std::move(reading));
  CKPT_ASSIGN_OR_RETURN(const auto changed, KeepTrainedCopies(model, several, *blobs));
  for (const std::string& name : changed) {
    model.notes.push_back(StrCat("'", name,
                                 "' is trained on one pipeline stage alone, which is shown; other "
                                 "stages hold it untrained"));
  }
  return {};
}

// The layers that each stage held, if that is known of every layer that has
// parameters (others go with those before them); empty if that is what the
// layout says without a split.
std::vector<uint32_t> SplitOfStages(const Parsed& parsed, const Named& named,
                                    const StepModel& header) {
  std::map<uint32_t, std::set<uint32_t>> stages;  // by layer
  for (uint32_t i = 0; i < named.parameters.size(); ++i) {
    const Parameter& parameter = header.parameter(ParameterIndex{i});
    if (parameter.stage != StageRule::kLayer) continue;
    if (named.parameters[i].anywhere) return {};
    for (const auto& [stage, shapes] : named.parameters[i].shapes) {
      stages[parameter.layer].insert(stage);
    }
  }
  std::vector<uint32_t> split(parsed.pp);
  uint32_t last = 0;
  const uint32_t layers = header.LayerCount();
  for (uint32_t layer = 0; layer < layers; ++layer) {
    if (const auto held = stages.find(layer); held != stages.end()) {
      if (held->second.size() != 1 || *held->second.begin() < last) return {};
      last = *held->second.begin();
    }
    ++split[last];
  }
  const bool even = std::count(split.begin(), split.end(), split[0]) == int64_t{parsed.pp};
  // A stage without a layer has no name among layouts.
  const bool empty = std::count(split.begin(), split.end(), 0u) > 0;
  return even || empty ? std::vector<uint32_t>() : split;
}

void SetLayout(const TagFiles& files, const Parsed& parsed, Layout& layout) {
  layout.tp = parsed.tp;
  layout.pp = parsed.pp;
  layout.dp = parsed.dp;
  layout.ep = parsed.ep;
  layout.zero = static_cast<uint32_t>(parsed.stage);
  layout.naming = files.names.layers.empty() ? Naming::kPlain : Naming::kPipe;
}

void FillHeader(const TagFiles& files, const Parsed& parsed, const Named& named,
                StepModel& header) {
  const ModelStates& first = parsed.models.begin()->second;
  header.framework = "deepspeed";
  header.framework_version = first.ds_version;
  header.id = files.step.id;
  header.iteration = first.global_steps;
  // When an optimizer without ZeRO is made it takes a step without gradients: decay
  // reaches the masters then, and the weights with the next step that is taken.
  header.weights_apart = parsed.stage == 0 && first.optimizer.has_value() &&
                         first.optimizer->form != UnshardedOptimizer::Form::kPlain &&
                         first.global_steps == first.skipped_steps;
  if (header.weights_apart) {
    header.notes.push_back(
        "no optimizer step was taken before this save: weights are as the model was made; they "
        "are not "
        "compared with their masters, which weight decay may have changed");
  }
  header.layout.split = SplitOfStages(parsed, named, header);
  // Layouts name directories.
  if (header.layout.ToString().size() > NAME_MAX) header.layout.split.clear();
}

// States that are documents.  One that is None is nothing that anybody misses.
void LeaveOutOpaque(const Parsed& parsed, StepModel& header) {
  std::set<std::pair<size_t, std::string_view>> told;
  for (const auto& [key, states] : parsed.optimizers) {
    for (size_t g = 0; g < states.partitions.size(); ++g) {
      const PartitionStates& partition = states.partitions[g];
      for (const std::string& name : partition.opaque) {
        const bool none = std::ranges::find(partition.nothing, name) != partition.nothing.end();
        if (none || !told.emplace(g, name).second) continue;
        LeaveOut(
            header,
            {LeftOutPart::kOptimizer, StrCat("optimizer state '", name, "' of group ", g),
             "it is not a flat tensor of its partition, and is carried for this layout only", ""});
      }
    }
  }
}

void KeepDocuments(const Parsed& parsed, StepModel& header) {
  auto& documents = header.documents;
  const auto append = [&](const std::vector<Document>& more) {
    documents.insert(documents.end(), more.begin(), more.end());
  };
  const ModelStates& model = parsed.model(0);
  append(model.documents);
  const auto zero = parsed.optimizers.begin();
  const bool has_zero = zero != parsed.optimizers.end();
  if (has_zero) append(zero->second.documents);
  for (uint32_t mp = 1; mp < parsed.model_ranks(); ++mp) {
    AddOtherDocuments(model.documents, parsed.model(mp).documents, StrCat("mp", mp), documents);
    if (!has_zero) continue;
    AddOtherDocuments(zero->second.documents, parsed.optimizers.at(RankKey{mp, 0}).documents,
                      StrCat("dp0_mp", mp), documents);
  }
  for (const auto& [key, states] : parsed.optimizers) append(states.opaque);
  LeaveOutOpaque(parsed, header);
}

}  // namespace

Result<StepModel> Place(const TagFiles& files, const Parsed& parsed, const Named& named,
                        Assembler assembler) {
  StepModel& header = assembler.header();
  header.notes = named.notes;
  for (const LeftOut& one : named.left_out) LeaveOut(header, one);
  SetLayout(files, parsed, header.layout);
  StateDict dict;
  dict.unfit = StateDict::Unfit::kLeftOut;
  dict.model_dtype = named.model_dtype;
  dict.second_names.assign(named.aliases.begin(), named.aliases.end());
  const ModelStates& model = parsed.model(0);
  if (model.info) dict.cuts = &*model.info;
  CKPT_ASSIGN_OR_RETURN(dict.sizes, SizesOf(model.variables, files.options, files.step));
  CKPT_RETURN_IF_ERROR(AddTensors(files, parsed, named, dict));
  CKPT_RETURN_IF_ERROR(AddOptimizers(parsed, named, dict, header));
  KeepDocuments(parsed, header);
  CKPT_ASSIGN_OR_RETURN(const Settled settled, Settle(dict, files.options, assembler));
  if (settled.derived > 0) {
    header.notes.push_back(StrCat(settled.derived,
                                  " weights are not stored; they are shown as their masters cast "
                                  "to ",
                                  DTypeName(named.model_dtype)));
  }
  FillHeader(files, parsed, named, header);
  CKPT_RETURN_IF_ERROR(
      CarryModelFiles(assembler, RootBelow(files.step.root, files.step.save), files.step.Prefix()));
  // A captured step lies in files of ranks, with nothing of anybody's beside them.
  if (!files.open_part) CKPT_RETURN_IF_ERROR(CarryBeside(assembler, files.step, "latest"));
  CKPT_ASSIGN_OR_RETURN(StepModel finished, std::move(assembler).Finish());
  if (!files.open_part) CKPT_RETURN_IF_ERROR(ChooseStages(files, parsed, named, finished));
  return finished;
}

}  // namespace ckptfs::deepspeed::native
