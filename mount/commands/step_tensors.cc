// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/step_tensors.h"

#include <fnmatch.h>

#include <set>

#include "core/base/edit_distance.h"
#include "core/base/strings.h"
#include "core/view/shard.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr size_t kNameErrors = 4;
constexpr size_t kNamesCompared = 4096;
constexpr size_t kStagesTold = 8;

Error NoSuchParameter(const StepModel& model, const TensorChoice& choice) {
  std::vector<std::string> names;
  for (const Parameter& parameter : model.parameters) {
    if (names.size() < kNamesCompared) names.push_back(parameter.name);
  }
  std::string text = "no tensor";
  if (!choice.parameter.empty()) text += StrCat(" '", choice.parameter, "'");
  if (!choice.kind.empty()) text += StrCat(" of kind '", choice.kind, "'");
  const std::string meant = MeantText(choice.parameter, names, kNameErrors);
  Error error{ErrorCode::kNotFound, text + meant};
  error.parameter = choice.parameter;
  if (!meant.empty()) return error;
  return std::move(error).Needing("`ckptfs ls` lists them; * in a name matches anything");
}

// Names the source's tensor-parallel ranks that hold it: "tp 0-1 cut dim 0", "tp 0-1 whole".
std::string TensorRanks(const StepModel& model, const Parameter& parameter) {
  const bool expert = parameter.expert || parameter.stacked_experts > 0;
  const uint32_t degree = expert ? model.layout.etp : model.layout.tp;
  if (degree <= 1) return "";
  const Pattern& pattern = parameter.source_pattern ? *parameter.source_pattern : parameter.pattern;
  const std::string ranks = StrCat(expert ? "etp" : "tp", " 0-", degree - 1);
  switch (pattern.kind) {
    case PatternKind::kShard: {
      std::string dims;
      for (const Cut& cut : pattern.cuts) dims += StrCat(dims.empty() ? "" : ", ", cut.dim);
      return StrCat(ranks, " cut dim ", dims);
    }
    case PatternKind::kUnique: return StrCat("one of ", ranks);
    default: return StrCat(ranks, " whole");
  }
}

std::vector<uint32_t> PipelineStages(const StepModel& model, const Parameter& parameter) {
  if (model.layout.pp <= 1) return {};
  if (!parameter.source_stages.empty()) return parameter.source_stages;
  auto stages = StagesOf(model, model.layout, parameter);
  return stages ? *std::move(stages) : std::vector<uint32_t>();
}

}  // namespace

void AddTensorChoice(Command& command, TensorChoice& choice) {
  command
      .Add("PARAM", choice.parameter, "Only this parameter, or those that a pattern with * matches")
      .Offers(kOfferNothing);
  command.Add("--kind", choice.kind, "Only this state: weight, master, exp_avg, ...").Value("KIND");
}

bool Chooses(const TensorChoice& choice, const std::string& name, const std::string& kind) {
  if (!choice.kind.empty() && choice.kind != kind) return false;
  return choice.parameter.empty() || choice.parameter == name ||
         ::fnmatch(choice.parameter.c_str(), name.c_str(), 0) == 0;
}

Result<std::vector<AtomIndex>> ChooseAtoms(const StepModel& model, const TensorChoice& choice) {
  const auto alias =
      choice.parameter.empty() ? std::nullopt : model.FindParameter(choice.parameter);
  std::vector<AtomIndex> atoms;
  for (size_t i = 0; i < model.atoms.size(); ++i) {
    const Atom& atom = model.atoms[i];
    const bool named = alias == atom.parameter && (choice.kind.empty() || choice.kind == atom.kind);
    if (named || Chooses(choice, model.parameter(atom.parameter).name, atom.kind)) {
      atoms.push_back(AtomIndex{static_cast<uint32_t>(i)});
    }
  }
  const bool asked = !choice.parameter.empty() || !choice.kind.empty();
  if (!atoms.empty() || !asked) return atoms;
  return Fail(NoSuchParameter(model, choice));
}

std::string ShapeText(const std::vector<uint64_t>& shape) {
  std::string text = "[";
  for (const uint64_t size : shape) text += StrCat(text.size() == 1 ? "" : ", ", size);
  return text + "]";
}

Json AtomJson(const StepModel& model, const Atom& atom) {
  return {{"name", model.parameter(atom.parameter).name},
          {"kind", atom.kind},
          {"optimizer", atom.optimizer},
          {"shape", std::vector<uint64_t>(atom.shape.begin(), atom.shape.end())},
          {"dtype", std::string(DTypeName(atom.dtype))},
          {"bytes", ByteCount(atom.shape, atom.dtype).value_or(0)}};
}

Json HolderJson(const StepModel& model, const Atom& atom) {
  const Parameter& parameter = model.parameter(atom.parameter);
  std::set<uint32_t> blobs;
  AnyBlobOf(atom.source, [&](uint32_t blob) { return blobs.insert(blob), false; });
  Json json = {{"files", blobs.size()}, {"copies", AllCopies(atom.source).size()}};
  json["file"] = nullptr;
  if (!blobs.empty()) json["file"] = model.blobs[*blobs.begin()].path;
  json["averaged"] = IsAveraged(atom.source);
  json["tensor_ranks"] = TensorRanks(model, parameter);
  json["stages"] = PipelineStages(model, parameter);
  json["cast_of"] = nullptr;
  if (const auto of = DerivedFrom(atom.source)) json["cast_of"] = model.atom(*of).kind;
  return json;
}

std::string HolderText(const Json& holder) {
  if (holder["cast_of"].is_string())
    return StrCat("cast of ", holder["cast_of"].get<std::string>());
  std::string text = holder.value("tensor_ranks", "");
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
  const Json& stages = holder["stages"];
  if (!stages.empty()) {
    std::string list;
    for (size_t i = 0; i < stages.size() && i < kStagesTold; ++i) {
      list += StrCat(i == 0 ? "pp " : ", ", stages[i].get<uint32_t>());
    }
    add(stages.size() > kStagesTold ? list + ", ..." : list);
  }
  const auto copies = holder.value("copies", size_t{0});
  if (copies > 1)
    add(StrCat(holder.value("averaged", false) ? "average of " : "", copies, " copies"));
  const auto files = holder.value("files", size_t{0});
  if (files == 0) add("in the index");
  if (files == 1) add(holder.value("file", ""));
  if (files > 1) add(StrCat(files, " files"));
  return text;
}

}  // namespace ckptfs
