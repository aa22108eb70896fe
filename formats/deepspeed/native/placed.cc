// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native/placed.h"

#include <algorithm>
#include <climits>
#include <set>
#include <string_view>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/deepspeed/step_directories.h"
#include "formats/tools/model_files.h"

namespace ckptfs::deepspeed::native {
namespace {

Status Declare(const Parsed& parsed, const Named& named, const Sharded& sharded, Placer& placer) {
  for (size_t i = 0; i < named.parameters.size(); ++i) {
    const NamedParameter& parameter = named.parameters[i];
    std::vector<uint32_t> stages;
    for (const auto& [stage, shapes] : parameter.shapes) {
      if (parsed.pp > 1 && !parameter.anywhere) stages.push_back(stage);
    }
    CKPT_RETURN_IF_ERROR(
        placer.Declare(parameter.name, parameter.role, sharded.shardings[i], std::move(stages)));
  }
  return {};
}

// A weight that several stages hold is met once for each.
using StoredWeights = std::map<std::pair<ParameterIndex, uint32_t>, uint32_t>;  // tp -> how many

Result<StoredWeights> PlaceWeights(const Named& named, Placer& placer) {
  StoredWeights stored;
  for (const NamedWeight& weight : named.weights) {
    const Holder holder{stored[{weight.parameter, weight.tp}]++, weight.tp};
    CKPT_RETURN_IF_ERROR(placer.AddTensor(weight.parameter, "weight", *weight.tensor, holder));
  }
  return stored;
}

// Stage 3 keeps a frozen parameter as one flat slice per data-parallel rank.
Status PlaceFrozen(const Parsed& parsed, const Named& named, const StoredWeights& stored,
                   Placer& placer) {
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
      if (stored.contains({*index, tp})) continue;  // whole in the module
      CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(*shape));
      const uint64_t slice = CeilDiv(elements, parsed.dp);
      const uint64_t begin = std::min(elements, key.dp * slice);
      const uint64_t end = std::min(elements, begin + slice);
      CKPT_ASSIGN_OR_RETURN(const Placer::Local local,
                            placer.LocalOf(*index, "weight", tensor.dtype(),
                                           Holder{named[*index].PlaceOf(stage), tp}));
      auto fragment = tensor.Slice(0, begin, end);
      if (!fragment || tensor.elements() != slice || tensor.shape().size() != 1) {
        return Refuse(model.file, ": the fragment of frozen '", name, "' has shape ",
                      ShapeToString(tensor.shape()), tensor.dense() ? "" : " and is not contiguous",
                      ", but a slice has ", slice, " elements");
      }
      placer.AddFragment(local, *fragment);
    }
  }
  return {};
}

Status DeriveWeights(const Named& named, Placer& placer, std::vector<std::string>& notes) {
  size_t derived = 0;
  for (uint32_t i = 0; i < named.parameters.size(); ++i) {
    const NamedParameter& parameter = named.parameters[i];
    if (parameter.role != Role::kTrainable || placer.HasWeight(ParameterIndex{i})) continue;
    CKPT_ASSIGN_OR_RETURN(const bool master,
                          placer.DeriveWeight(ParameterIndex{i}, named.model_dtype));
    if (!master) {
      return Fail(Error{ErrorCode::kInvalid, "no file has its weight or its master"}.OfParameter(
          parameter.name));
    }
    ++derived;
  }
  if (derived > 0) {
    notes.push_back(StrCat(derived,
                           " weights are not stored; they are shown as their masters cast to ",
                           DTypeName(named.model_dtype)));
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
  header.layout.tp = parsed.tp;
  header.layout.pp = parsed.pp;
  header.layout.dp = parsed.dp;
  header.layout.ep = parsed.ep;
  header.layout.zero = static_cast<uint32_t>(parsed.stage);
  header.layout.naming = files.names.layers.empty() ? Naming::kPlain : Naming::kPipe;
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
                        const Sharded& sharded, Assembler assembler) {
  StepModel& header = assembler.header();
  header.notes = named.notes;
  for (const LeftOut& one : named.left_out) LeaveOut(header, one);
  header.model_dtype = named.model_dtype;
  sharded.rules.Describe(header);
  header.layers = std::max(header.layers, sharded.layers);
  header.notes.insert(header.notes.end(), sharded.notes.begin(), sharded.notes.end());
  Placer placer(assembler);
  CKPT_RETURN_IF_ERROR(Declare(parsed, named, sharded, placer));
  CKPT_ASSIGN_OR_RETURN(const StoredWeights stored, PlaceWeights(named, placer));
  CKPT_RETURN_IF_ERROR(PlaceFrozen(parsed, named, stored, placer));
  CKPT_RETURN_IF_ERROR(PlaceOptimizer(parsed, named, placer, header));
  CKPT_RETURN_IF_ERROR(DeriveWeights(named, placer, header.notes));
  FillHeader(files, parsed, named, header);
  KeepDocuments(parsed, header);
  CKPT_RETURN_IF_ERROR(placer.FinishGroups());
  for (const auto& [alias, name] : named.aliases) {
    if (const auto index = named.Find(name)) assembler.AddAlias(alias, *index);
  }
  CKPT_RETURN_IF_ERROR(
      CarryModelFiles(assembler, RootBelow(files.step.root, files.step.save), files.step.Prefix()));
  // A captured step lies in files of ranks, with nothing of anybody's beside them.
  if (!files.open_part) CKPT_RETURN_IF_ERROR(CarryBeside(assembler, files.step, "latest"));
  return std::move(assembler).Finish();
}

}  // namespace ckptfs::deepspeed::native
