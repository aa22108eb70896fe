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
#include "core/model/step_notes.h"

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

// What of the step is read from its side blob.
Json SideBlobOf(const StepModel& model, BlobIndex side) {
  uint64_t atoms = 0;
  for (const Atom& atom : model.atoms) atoms += IsPacked(model, atom) ? 1 : 0;
  const Blob& blob = model.blob(side);
  return {{"file", model.PathOf(blob)},
          {"bytes", blob.stamp.size},
          {"tensors", atoms}};
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
  Json documents = Json::array();
  for (const Document& document : model.documents) {
    documents.push_back(document.scope.empty() ? document.key
                                               : StrCat(document.key, "@", document.scope));
  }
  json["documents"] = std::move(documents);
  json["source"] = BlobsOf(model);
  if (const auto side = FindSideBlob(model)) json["side_blob"] = SideBlobOf(model, *side);
  json["notes"] = model.notes;
  return Print(json);
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
  return Print(json);
}

namespace {

std::string Joined(const std::vector<std::string>& words, std::string_view separator) {
  std::string text;
  for (const std::string& word : words) text += StrCat(text.empty() ? "" : separator, word);
  return text;
}

std::string ShownText(const LayoutSurvey::Format& format) {
  return StrCat("  ", format.name, "/: ",
                format.shown.empty() ? "none of them" : Joined(format.shown, " "), "\n");
}

// A reason once, with the layouts and the formats that it is about.
std::string RefusedText(const LayoutSurvey& survey) {
  std::vector<std::pair<LayoutSurvey::Refused, std::vector<std::string>>> causes;
  for (const LayoutSurvey::Format& format : survey.formats) {
    for (const LayoutSurvey::Refused& refused : format.refused) {
      const auto same = std::find_if(causes.begin(), causes.end(), [&](const auto& cause) {
        return cause.first.reason == refused.reason && cause.first.layouts == refused.layouts;
      });
      if (same != causes.end()) {
        same->second.push_back(format.name);
      } else {
        causes.push_back({refused, {format.name}});
      }
    }
  }
  std::string text;
  for (const auto& [refused, formats] : causes) {
    const bool all = refused.layouts.size() == survey.offers.size();
    text += StrCat("  ", all ? "any layout" : Joined(refused.layouts, ", "), " (", Joined(formats, ", "),
                   "): ", refused.reason, "\n");
  }
  return text;
}

Json CauseJson(const LayoutOffer::Cause& cause) {
  const RefusalDetail detail = DetailOf(cause.reason);
  Json json = {{"formats", cause.formats},
               {"code", std::string(ErrorCodeName(cause.code))},
               {"reason", cause.reason}};
  json["parameter"] = detail.parameter.empty() ? Json(nullptr) : Json(detail.parameter);
  json["needs"] = detail.needs.empty() ? Json(nullptr) : Json(detail.needs);
  return json;
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
      "This directory has step ", name, " in every parallel layout that it can be shown in.\n"
      "Name a layout and it is there, though it is not listed: ls tp2_dp4_zero1\n\n"
      "A layout is tokens joined by _ in any order: tpN ppN dpN epN etpN cpN vppN zero0..zero3\n"
      "bf16 fp16 fp32 (of weights) splitN-N... (layers per stage) plain pipe (names).\n"
      "The step was saved as ", step.model.layout.ToString(), ".\n");
  for (const std::string& note : WeightsOnlyNotes(step.model)) {
    text += StrCat("Its optimizer is in no view: ", note, "\n");
  }
  text += StrCat(
      "\n"
      "Of the layouts that are asked for most these work:\n");
  for (const LayoutSurvey::Format& format : survey.formats) text += ShownText(format);
  const std::string refused = RefusedText(survey);
  if (!refused.empty()) text += StrCat("\nand these do not:\n", refused);
  text += StrCat(
      "\nWhy another one is not there, after `ls LAYOUT` in this directory:\n"
      "  getfattr -n user.ckptfs.reason --only-values .\n"
      "  ckptfs explain LAYOUT --step ", name, "\n"
      "The same for programs is in layouts.json.\n");
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
      if (answer.refusal.empty()) formats.push_back(answer.format);
    }
    Json refused = Json::array();
    for (const LayoutOffer::Cause& cause : offer->Causes()) refused.push_back(CauseJson(cause));
    json["layouts"][offer->name] = {{"world", offer->layout.World()},
                                    {"formats", std::move(formats)},
                                    {"refused", std::move(refused)}};
  }
  return Print(json);
}

}  // namespace ckptfs
