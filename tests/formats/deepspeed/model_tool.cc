// SPDX-License-Identifier: Apache-2.0
//
// model_tool PATH [--step ID] [--family NAME] [--replicated R]... [--averaged R]... [--extract OUT]
//
// Indexes a checkpoint as the daemon would and prints what it found as JSON;
// --extract writes every atom, gathered through the plan reader, as one
// safetensors file with the keys <kind>/<parameter>.  Exit code 1 with the
// error on stderr if the checkpoint is refused.

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

#include "core/adopt/scan.h"
#include "core/base/strings.h"
#include "core/blob/blob_reader.h"
#include "core/blob/safetensors_header.h"
#include "core/view/plan_reader.h"
#include "formats/families/shipped.h"
#include "formats/registry.h"

namespace ckptfs {
namespace {

struct Arguments {
  std::string path;
  std::string step;
  std::string extract;
  std::vector<std::string> family_files;
  SourceOptions options;
};

Arguments Parse(int argc, char** argv) {
  Arguments out;
  out.path = argc > 1 ? argv[1] : "";
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const std::string value = argv[i + 1];
    if (flag == "--step") out.step = value;
    if (flag == "--family") out.options.family = value;
    if (flag == "--family-file") out.family_files.push_back(value);
    if (flag == "--replicated") out.options.replicated.push_back(value);
    if (flag == "--averaged") out.options.averaged.push_back(value);
    if (flag == "--extract") out.extract = value;
  }
  return out;
}

std::string KeyOf(const StepModel& model, const Atom& atom) {
  return StrCat(atom.kind, "/", model.parameter(atom.parameter).name);
}

nlohmann::json Describe(const StepModel& model) {
  nlohmann::json out;
  out["id"] = model.id;
  out["iteration"] = model.iteration;
  out["framework"] = model.framework;
  out["layout"] = model.layout.ToString();
  out["family"] = model.family;
  out["layers"] = model.layers;
  out["notes"] = model.notes;
  out["left_out"] = nlohmann::json::array();
  for (const LeftOut& one : model.left_out) out["left_out"].push_back(LeftOutText(one));
  out["model_dtype"] = model.model_dtype ? DTypeName(*model.model_dtype) : "";
  for (const Parameter& parameter : model.parameters) {
    out["parameters"].push_back({{"name", parameter.name},
                                 {"shape", parameter.shape},
                                 {"role", static_cast<int>(parameter.role)},
                                 {"pattern", PatternName(parameter.pattern)},
                                 {"stage", static_cast<int>(parameter.stage)},
                                 {"source_stages", parameter.source_stages},
                                 {"layer", parameter.layer}});
  }
  for (const Atom& atom : model.atoms) {
    size_t series = 0;
    for (const Gather& gather : atom.source.gathers) series += gather.series.size();
    out["atoms"][KeyOf(model, atom)] = {{"dtype", DTypeName(atom.dtype)},
                                        {"source", static_cast<int>(atom.source.kind)},
                                        {"copies", atom.source.gathers.size()},
                                        {"series", series},
                                        {"python_number", atom.source.python_number},
                                        {"derived", atom.derived}};
  }
  for (const Alias& alias : model.aliases) {
    out["aliases"][alias.name] = model.parameter(alias.parameter).name;
  }
  for (const Group& group : model.groups) {
    nlohmann::json names = nlohmann::json::array();
    for (ParameterIndex index : group.parameters) names.push_back(model.parameter(index).name);
    out["groups"].push_back(names);
  }
  for (const Document& document : model.documents) {
    out["documents"].push_back(
        StrCat(document.key, document.scope.empty() ? "" : "@", document.scope));
  }
  out["blobs"] = model.blobs.size();
  return out;
}

Status Extract(const StepModel& model, const std::string& path) {
  std::vector<SafetensorsEntry> entries;
  std::vector<const Atom*> atoms;
  for (const Atom& atom : model.atoms) {
    entries.push_back(SafetensorsEntry{KeyOf(model, atom), atom.dtype, atom.shape, 0, 0});
    atoms.push_back(&atom);
  }
  CKPT_ASSIGN_OR_RETURN(const std::string header, RenderSafetensorsHeader({}, entries));
  std::ofstream out(path, std::ios::binary);
  out << header;
  auto blobs = BlobReader::Create(model, {});
  for (size_t i = 0; i < atoms.size(); ++i) {
    PlanBuilder builder;
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atoms[i]->shape));
    builder.Atom(AtomIndex{static_cast<uint32_t>(i)},
                 std::make_shared<LocalTensor>(WholeTensor(atoms[i]->shape)), 0, elements,
                 atoms[i]->dtype);
    const Plan plan = std::move(builder).Finish();
    CKPT_RETURN_IF_ERROR(plan.Validate(model));
    std::vector<std::byte> bytes(plan.size());
    CKPT_ASSIGN_OR_RETURN(const size_t got, PlanReader(plan, model, *blobs).Read(0, bytes));
    if (got != bytes.size()) return Fail(ErrorCode::kDataLoss, entries[i].name);
    out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(got));
  }
  return {};
}

Status Run(Arguments arguments) {
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  for (const std::string& file : arguments.family_files)
    CKPT_RETURN_IF_ERROR(families.AddFile(file));
  arguments.options.families = &families;
  const auto sources = MakeSources();
  CKPT_ASSIGN_OR_RETURN(const Place place, PlaceOf(arguments.path));
  CKPT_ASSIGN_OR_RETURN(const IngestResult result, IngestPlace(place, sources, arguments.options));
  nlohmann::json out = nlohmann::json::array();
  for (const IngestedStep& step : result.steps) {
    if (!arguments.step.empty() && step.model.id != arguments.step) continue;
    out.push_back(Describe(step.model));
    out.back()["latest"] = step.candidate.latest;
    if (!arguments.extract.empty()) CKPT_RETURN_IF_ERROR(Extract(step.model, arguments.extract));
  }
  std::cout << nlohmann::json{{"steps", out}, {"skipped", result.skipped}}.dump(1) << "\n";
  return {};
}

}  // namespace
}  // namespace ckptfs

int main(int argc, char** argv) {
  const ckptfs::Status status = ckptfs::Run(ckptfs::Parse(argc, argv));
  if (status) return 0;
  std::cerr << status.error().message << "\n";
  return 1;
}
