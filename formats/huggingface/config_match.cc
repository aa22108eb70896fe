// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/config_match.h"

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/io/root.h"
#include "formats/huggingface/module_names.h"
#include "formats/huggingface/names.h"
#include "formats/tools/model_files.h"
#include "formats/tools/source_traits.h"

namespace ckptfs::huggingface {
namespace {

constexpr std::string_view kRemedy =
    "dcp/, rank<N>/ and deepspeed/ have the tensors under the step's own names; give the "
    "config.json of "
    "the module that was saved, if transformers has it";

std::string FirstOf(const std::vector<std::string>& names) {
  const std::string more = names.size() > 1 ? StrCat(" and ", names.size() - 1, " more") : "";
  return StrCat("'", names.front(), "'", more);
}

tl::unexpected<Error> RefuseConfig(std::string reason, std::string_view parameter) {
  Error error{ErrorCode::kUnsupported, std::move(reason)};
  error.parameter = parameter;
  return Fail(std::move(error).Needing(kRemedy));
}

Shape ShapeOf(const StepModel& step, const ShownTensor& tensor) {
  return step.parameter(step.atom(tensor.atom).parameter).shape;
}

// Layers are what the first number of a name counts, where every required name that has one has it
// at the same place.
std::optional<uint64_t> LayersOf(const ModuleNames& wanted, std::span<const ShownTensor> tensors) {
  std::string_view before;  // "model.layers."
  for (const std::string& name : wanted.required) {
    const size_t number = name.find('#');
    if (number == name.npos) continue;
    const std::string_view stem = std::string_view(name).substr(0, number);
    if (!before.empty() && stem != before) return std::nullopt;
    before = stem;
  }
  if (before.empty()) return std::nullopt;
  uint64_t layers = 0;
  for (const ShownTensor& tensor : tensors) {
    const size_t at = tensor.name.find(before);
    if (at != 0 && (at == tensor.name.npos || tensor.name[at - 1] != '.')) continue;
    uint64_t number = 0;
    for (size_t i = at + before.size(); i < tensor.name.size() && number < (1u << 20); ++i) {
      const char digit = tensor.name[i];
      if (digit < '0' || digit > '9') break;
      number = number * 10 + static_cast<uint64_t>(digit - '0');
    }
    layers = std::max(layers, number + 1);
  }
  return layers;
}

// Checks what from_pretrained compares by shape, as far as the config's own words go.
Status CheckSizes(const StepModel& step, const ConfigFacts& facts, const ModuleNames& wanted,
                  std::span<const ShownTensor> tensors) {
  for (const ShownTensor& tensor : tensors) {
    const Shape shape = ShapeOf(step, tensor);
    const bool words =
        tensor.name.ends_with("embed_tokens.weight") || tensor.name.ends_with("wte.weight");
    if (words && facts.vocabulary && shape.size() == 2 && shape[0] != *facts.vocabulary) {
      return RefuseConfig(StrCat("config.json has "
                                 "vocab_size ",
                                 *facts.vocabulary, ", but '", tensor.name, "' has ", shape[0],
                                 " rows: from_pretrained fails"),
                          tensor.name);
    }
    const bool norm = tensor.name == StrCat(wanted.prefix, ".norm.weight");
    if (norm && facts.hidden && shape.size() == 1 && shape[0] != *facts.hidden) {
      return RefuseConfig(StrCat("config.json has "
                                 "hidden_size ",
                                 *facts.hidden, ", but '", tensor.name, "' has ", shape[0],
                                 " elements: from_pretrained fails"),
                          tensor.name);
    }
  }
  const auto layers = LayersOf(wanted, tensors);
  if (!layers || !facts.layers || *layers == 0) return {};
  if (*layers > *facts.layers && *layers - *facts.layers > facts.predictors) {
    return RefuseConfig(StrCat("config.json has ", *facts.layers, " layers, but the step has ",
                               *layers, ": from_pretrained would ignore the others"),
                        "");
  }
  if (*layers >= *facts.layers) return {};
  return RefuseConfig(
      StrCat("config.json has ", *facts.layers,
             " layers, but the step "
             "has ",
             *layers, ": from_pretrained would begin the others with random values"),
      "");
}

constexpr std::string_view kExperts = ".experts.";
constexpr std::string_view kRouter = ".gate.weight";
constexpr std::string_view kRouterBias = ".e_score_correction_bias";

bool AnyHas(const auto& names, std::string_view part) {
  return std::ranges::any_of(names,
                             [&](const std::string& name) { return name.find(part) != name.npos; });
}

// True if models of the class may have tensors of the kind, and the step has experts or a router
// but no tensor of the kind.
bool LacksOfExperts(const ModuleNames& wanted, std::span<const std::string> names,
                    std::string_view kind) {
  const bool may = AnyHas(wanted.optional, kind) || AnyHas(wanted.optional_in_files, kind);
  return may && !AnyHas(names, kind) && (AnyHas(names, kExperts) || AnyHas(names, kRouter));
}

std::string ClassOf(const ConfigFacts& facts) {
  if (!facts.architectures.empty()) return facts.architectures.front();
  return facts.model_type.empty() ? "its architecture" : facts.model_type;
}

bool IsWeights(const std::string& path) {
  const auto found = ChooseWeights(std::vector{std::string(LastComponent(path))});
  return found && *found && !(*found)->index && !(*found)->adapter;
}

bool IsShard(const std::string& path) { return ShardNumberOf(LastComponent(path)).has_value(); }

}  // namespace

ConfigSource CarriedConfigOf(const StepModel& step, const ConfigFacts& facts) {
  std::set<std::pair<uint32_t, std::string>> configs, weights;  // their directories
  for (const Blob& blob : step.blobs) {
    const std::pair place{blob.root, ParentPath(blob.path)};
    if (LastComponent(blob.path) == kModelConfig) configs.insert(place);
    const bool named = !facts.weights.empty() && LastComponent(blob.path) == facts.weights;
    if (named || IsWeights(blob.path) || IsShard(blob.path)) weights.insert(place);
  }
  const bool together =
      std::ranges::any_of(configs, [&](const auto& place) { return weights.contains(place); });
  return TraitsOf(step).pretrained && together ? ConfigSource::kWithWeights
                                               : ConfigSource::kElsewhere;
}

Result<std::vector<std::string>> MatchConfig(const StepModel& step, const ConfigFacts& facts,
                                             std::span<const ShownTensor> tensors,
                                             ConfigSource source) {
  std::vector<std::string> lines;
  const std::string class_name = facts.architectures.empty() ? "" : facts.architectures.front();
  CKPT_ASSIGN_OR_RETURN(auto wanted,
                        FindModuleNames(ModuleNamesText(), class_name, facts.model_type));
  if (wanted) wanted->Require(facts.nulls);
  if (!wanted || !facts.quantisation.empty()) {
    if (source == ConfigSource::kWithWeights) return lines;
    lines.push_back(StrCat("names are not compared: ckptfs does not know how ", ClassOf(facts),
                           facts.quantisation.empty() ? "" : ", quantised,",
                           " calls its tensors; from_pretrained tells which tensors it misses"));
    return lines;
  }
  std::vector<std::string> names;
  for (const ShownTensor& tensor : tensors) {
    if (tensor.trainable || !step.parameter(step.atom(tensor.atom).parameter).shape.empty()) {
      names.push_back(tensor.name);
    }
  }
  const NamesFound found = CompareNames(*wanted, names, facts.tied.value_or(true));
  const bool nothing =
      !wanted->base_alone && found.ignored.size() + found.not_loaded.size() >= names.size();
  if (source == ConfigSource::kWithWeights && !nothing) return lines;
  if (!found.not_loaded.empty()) {
    return RefuseConfig(StrCat("from_pretrained of transformers 5.23 takes ",
                               FirstOf(found.not_loaded), ", as modules of ", ClassOf(facts),
                               " call it, to be another "
                               "tensor"),
                        found.not_loaded.front());
  }
  if (!found.missing.empty()) {
    return RefuseConfig(
        StrCat("names are not those of ", ClassOf(facts),
               " in config.json: from_pretrained "
               "would begin ",
               FirstOf(found.missing), " with random values",
               found.ignored.empty() ? "" : StrCat(" and ignore ", FirstOf(found.ignored))),
        found.ignored.empty() ? found.missing.front() : found.ignored.front());
  }
  for (const std::string_view kind : {kRouter, kExperts}) {
    if (!LacksOfExperts(*wanted, names, kind)) continue;
    return RefuseConfig(StrCat("the step has no '*", kind,
                               "', which from_pretrained would begin with values of its own"),
                        "");
  }
  if (LacksOfExperts(*wanted, names, kRouterBias)) {
    lines.push_back(StrCat("'*", kRouterBias,
                           "', which the step does not have: from_pretrained "
                           "begins it anew where the config asks for it"));
  }
  CKPT_RETURN_IF_ERROR(CheckSizes(step, facts, *wanted, tensors));
  if (!found.ignored.empty()) {
    lines.push_back(StrCat(FirstOf(found.ignored), ", which ", ClassOf(facts),
                           " does not have, as far as ckptfs knows: from_pretrained then "
                           "ignores it"));
  }
  if (!found.of_modules.empty()) {
    lines.push_back(StrCat("the names in the files: ", FirstOf(found.of_modules),
                           " has the name that modules of transformers 5 use; from_pretrained "
                           "loads it, "
                           "but readers that know only files (transformers 4, vLLM) do not"));
  }
  return lines;
}

}  // namespace ckptfs::huggingface
