// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/step_info.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "core/base/printable.h"
#include "core/base/strings.h"
#include "core/model/side_blob.h"

namespace ckptfs {
namespace {

using Json = nlohmann::ordered_json;

std::string Print(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kTrainable: return "trainable";
    case Role::kFrozen: return "frozen";
    case Role::kBuffer: return "buffer";
    case Role::kBeside: return "beside";
  }
  return "trainable";
}

Json ParametersOf(const StepModel& model) {
  std::map<std::string_view, std::pair<uint64_t, uint64_t>> by_role;  // number, elements
  for (const Parameter& parameter : model.parameters) {
    auto& [number, elements] = by_role[RoleName(parameter.role)];
    ++number;
    elements += ElementCount(parameter.shape).value_or(0);
  }
  Json json = Json::object();
  for (const auto& [role, counted] : by_role) {
    json[std::string(role)] = {{"number", counted.first}, {"elements", counted.second}};
  }
  return json;
}

Json KindsOf(const StepModel& model) {
  struct Sum {
    uint64_t atoms = 0;
    uint64_t bytes = 0;
    uint64_t derived = 0;
    std::map<std::string_view, uint64_t> dtypes;
  };
  std::map<std::string, Sum> kinds;
  for (const Atom& atom : model.atoms) {
    Sum& sum = kinds[atom.optimizer.empty() ? atom.kind : StrCat(atom.optimizer, ".", atom.kind)];
    ++sum.atoms;
    sum.bytes += ByteCount(atom.shape, atom.dtype).value_or(0);
    if (atom.derived) ++sum.derived;
    ++sum.dtypes[DTypeName(atom.dtype)];
  }
  Json json = Json::object();
  for (const auto& [kind, sum] : kinds) {
    Json dtypes = Json::array();
    for (const auto& [dtype, number] : sum.dtypes) dtypes.push_back(std::string(dtype));
    json[kind] = {{"atoms", sum.atoms}, {"bytes", sum.bytes}, {"dtypes", dtypes}};
    if (sum.derived > 0) json[kind]["derived"] = sum.derived;
  }
  return json;
}

Json BlobsOf(const StepModel& model) {
  uint64_t bytes = 0;
  for (const Blob& blob : model.blobs) bytes += blob.side ? 0 : blob.stamp.size;
  const bool side = FindSideBlob(model).has_value();
  std::vector<std::string> roots = model.roots;
  if (side) roots.pop_back();
  return {{"files", model.blobs.size() - (side ? 1 : 0)}, {"bytes", bytes}, {"roots", roots}};
}

// The part of the step that is read from its side blob.
Json SideBlobOf(const StepModel& model, BlobIndex side) {
  uint64_t atoms = 0;
  for (const Atom& atom : model.atoms) atoms += IsPacked(model, atom) ? 1 : 0;
  const Blob& blob = model.blob(side);
  return {{"file", model.PathOf(blob)}, {"bytes", blob.stamp.size}, {"tensors", atoms}};
}

Json LeftOutOf(const StepModel& model) {
  Json all = Json::array();
  for (const LeftOut& one : model.left_out) {
    all.push_back({{"part", LeftOutPartName(one.part)},
                   {"what", one.what},
                   {"more", one.more},
                   {"why", one.why},
                   {"needs", one.remedy.empty() ? Json(nullptr) : Json(one.remedy)},
                   {"text", LeftOutText(one)}});
  }
  return all;
}

}  // namespace

std::string RenderStepInfo(const Step& step) {
  const StepModel& model = step.model;
  Json json;
  json["run"] = step.record.run;
  json["step"] = step.record.id;
  json["iteration"] = step.record.iteration;
  json["mtime_ns"] = step.record.mtime_ns;
  json["manifest"] = step.record.manifest.Hex();
  json["adopted_from"] = step.record.source;
  json["framework"] = model.framework;
  json["framework_version"] = model.framework_version;
  json["layout"] = model.layout.ToString();
  json["world"] = model.layout.World();
  if (model.model_dtype) json["model_dtype"] = std::string(DTypeName(*model.model_dtype));
  if (!model.family.empty()) json["family"] = model.family;
  if (model.layers > 0) json["layers"] = model.layers;
  json["parameters"] = ParametersOf(model);
  json["kinds"] = KindsOf(model);
  json["aliases"] = model.aliases.size();
  json["groups"] = model.groups.size();
  if (model.facts.tool) json["tool"] = model.facts.tool->tool;
  for (const ModelFile& file : model.facts.model_files.files) {
    json["model_files"].push_back(file.name);
  }
  Json documents = Json::array();
  for (const Document& document : model.documents) {
    documents.push_back(document.scope.empty() ? document.key
                                               : StrCat(document.key, "@", document.scope));
  }
  json["documents"] = std::move(documents);
  json["source"] = BlobsOf(model);
  if (const auto side = FindSideBlob(model)) json["side_blob"] = SideBlobOf(model, *side);
  json["notes"] = model.notes;
  json["left_out"] = LeftOutOf(model);
  return Print(json);
}

Json RefusalsJson(const LayoutOffer& offer) {
  const auto known = [](const std::string& text) {
    return text.empty() ? Json(nullptr) : Json(text);
  };
  Json refusals = Json::array();
  for (const LayoutOffer::Cause& cause : offer.Causes()) {
    refusals.push_back({{"layout", offer.name},
                        {"formats", cause.formats},
                        {"code", std::string(ErrorCodeName(cause.error.code))},
                        {"reason", cause.error.message},
                        {"parameter", known(cause.error.parameter)},
                        {"needs", known(cause.error.needs)}});
  }
  return refusals;
}

Json LeftOutJson(const LayoutOffer& offer) {
  Json left_out = Json::array();
  for (const LayoutOffer::Answer& answer : offer.answers) {
    for (const std::string& line : answer.left_out) {
      left_out.push_back({{"layout", offer.name}, {"format", answer.format}, {"what", line}});
    }
  }
  return left_out;
}

std::string RenderLayoutInfo(const StepRecord& record, const LayoutOffer& offer) {
  Json json;
  json["run"] = record.run;
  json["step"] = record.id;
  json["layout"] = offer.name;
  json["world"] = offer.layout.World();
  Json shown = Json::object();
  for (const LayoutOffer::Answer& answer : offer.answers) {
    shown[answer.format] = answer.Text();
  }
  json["formats"] = std::move(shown);
  json["refused"] = RefusalsJson(offer);
  json["left_out"] = LeftOutJson(offer);
  return Print(json);
}

namespace {

std::string Joined(const std::vector<std::string>& words, std::string_view separator) {
  std::string text;
  for (const std::string& word : words) text += StrCat(text.empty() ? "" : separator, word);
  return text;
}

// Where a line may end: never within a quoted name, a command in backticks, or a flag and its
// value.
std::vector<std::string_view> UnbrokenWords(std::string_view text) {
  std::vector<std::string_view> words;
  char quote = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const bool end = i == text.size();
    const bool opens = i == begin || text[i - 1] == ' ' || text[i - 1] == '(';
    if (!end && quote == 0 && (text[i] == '`' || (text[i] == '\'' && opens))) {
      quote = text.find(text[i], i + 1) == text.npos ? '\0' : text[i];
    } else if (!end && quote != 0 && text[i] == quote) {
      quote = 0;
    }
    if (!end && (text[i] != ' ' || quote != 0)) continue;
    const std::string_view word = text.substr(begin, i - begin);
    const bool flag = word.starts_with("--") && word.find_first_of(" ,") == word.npos;
    if (flag && !end) continue;  // with its value
    words.push_back(word);
    begin = i + 1;
  }
  return words;
}

// Lines of at most some 100 letters, of which all but the first begin with `further`.
std::string Wrapped(std::string_view first, std::string_view text, std::string_view further) {
  constexpr size_t kLine = 100;
  std::string out;
  std::string line(first);
  bool begun = false;
  for (const std::string_view word : UnbrokenWords(text)) {
    if (begun && line.size() + 1 + word.size() > kLine) {
      out += line + "\n";
      line = further;
      begun = false;
    }
    line += StrCat(begun ? " " : "", word);
    begun = true;
  }
  return StrCat(out, line, "\n");
}

constexpr std::string_view kFurther = "      ";

std::string ShownText(const LayoutSurvey::Format& format) {
  return Wrapped(StrCat("  ", format.name, "/: "),
                 format.shown.empty() ? "none of them" : Joined(format.shown, " "), kFurther);
}

// A line a cause, whatever a checkpoint's names hold.
std::string PrintableLines(const std::string& text) {
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    out += Printable(std::string_view(text).substr(begin, end - begin)) + "\n";
    begin = end + 1;
  }
  return out;
}

}  // namespace

std::string RenderViewReadme(const Step& step, const LayoutSurvey& survey) {
  const std::string name = StrCat(step.record.run, "/", step.record.id);
  std::string text = StrCat(
      "This directory has step ", name,
      " in every parallel layout that it can be shown in.\n"
      "Name a layout and it is there, though it is not listed: ls tp2_dp4_zero1\n\n"
      "A layout is tokens joined by _ in any order: tpN ppN dpN epN etpN cpN vppN zero0..zero3\n"
      "bf16 fp16 fp32 (of weights) splitN-N... (layers per stage) plain pipe (names).\n"
      "The step was saved as ",
      step.model.layout.ToString(), ".\n");
  if (!step.model.left_out.empty()) text += "\nParts of the checkpoint that no view shows:\n";
  for (const LeftOut& one : step.model.left_out) {
    text += Wrapped("  ", LeftOutText(one), kFurther);
  }
  text += StrCat(
      "\n"
      "Common layouts that work:\n");
  for (const LayoutSurvey::Format& format : survey.formats) text += ShownText(format);
  const std::vector<std::string> refused = survey.CauseLines();
  if (!refused.empty()) text += "\nCommon layouts that do not work:\n";
  for (const std::string& line : refused) text += Wrapped("  ", line, kFurther);
  const std::vector<std::string> left_out = survey.LeftOutLines();
  if (!left_out.empty()) text += "\nParts of the step that some views do not show:\n";
  for (const std::string& line : left_out) text += Wrapped("  ", line, kFurther);
  text += StrCat(
      "\nTo ask why another layout does not work, after `ls LAYOUT` in this directory:\n"
      "  getfattr -n user.ckptfs.reason --only-values .\n"
      "  ckptfs explain LAYOUT --step ",
      name,
      "\n"
      "layouts.json says the same for programs.\n");
  return PrintableLines(text);
}

std::string RenderLayoutIndex(const Step& step, const LayoutSurvey& survey) {
  Json json;
  json["run"] = step.record.run;
  json["step"] = step.record.id;
  json["source_layout"] = step.model.layout.ToString();
  json["layouts"] = Json::object();
  for (const auto& offer : survey.offers) {
    Json formats = Json::array();
    for (const LayoutOffer::Answer& answer : offer->answers) {
      if (!answer.refusal) formats.push_back(answer.format);
    }
    json["layouts"][offer->name] = {{"world", offer->layout.World()},
                                    {"formats", std::move(formats)},
                                    {"refused", RefusalsJson(*offer)},
                                    {"left_out", LeftOutJson(*offer)}};
  }
  return Print(json);
}

}  // namespace ckptfs
