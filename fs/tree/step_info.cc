// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/step_info.h"

#include <map>
#include <nlohmann/json.hpp>

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

}  // namespace ckptfs
