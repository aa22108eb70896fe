// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/param_files.h"

#include <algorithm>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/tensor/piece.h"
#include "fs/tree/names.h"

namespace ckptfs {
namespace {

using Metadata = std::map<std::string, std::string>;

bool AsSafetensors(const Atom& atom) { return !SafetensorsName(atom.dtype).empty(); }

std::string ComponentOf(const Atom& atom) {
  std::string name = atom.optimizer.empty() ? atom.kind : StrCat(atom.optimizer, ".", atom.kind);
  name += AsSafetensors(atom) ? ".safetensors" : ".bin";
  return EscapeComponent(name);
}

Metadata MetadataOf(const StepModel& model, const Atom& atom) {
  Metadata metadata{{"format", "pt"}, {"kind", atom.kind}, {"step", model.id}};
  if (!atom.optimizer.empty()) metadata["optimizer"] = atom.optimizer;
  if (atom.derived) metadata["derived"] = "cast";
  return metadata;
}

std::vector<SafetensorsEntry> EntriesOf(const StepModel& model, const Atom& atom) {
  return {SafetensorsEntry{model.parameter(atom.parameter).name, atom.dtype, atom.shape, 0, 0}};
}

Result<uint64_t> SizeOf(const StepModel& model, const Atom& atom) {
  CKPT_ASSIGN_OR_RETURN(const uint64_t bytes, ByteCount(atom.shape, atom.dtype));
  if (!AsSafetensors(atom)) return bytes;
  CKPT_ASSIGN_OR_RETURN(const uint64_t header,
                        SafetensorsHeaderSize(MetadataOf(model, atom), EntriesOf(model, atom)));
  return header + bytes;
}

// A component nobody has yet: two names may be cut to the same one.
std::string FreeComponent(const ParamIndex& index, const std::string& component) {
  std::string candidate = component;
  for (uint64_t k = 1; index.contains(candidate); ++k) {
    const std::string suffix = StrCat("~", k);
    candidate = component.substr(0, kMaxComponent - suffix.size()) + suffix;
  }
  return candidate;
}

}  // namespace

ParamIndex IndexParameters(const StepModel& model) {
  ParamIndex index;
  std::vector<std::string> components;
  components.reserve(model.parameters.size());
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    components.push_back(FreeComponent(index, EscapeComponent(model.parameters[i].name)));
    index[components.back()].parameter = ParameterIndex{static_cast<uint32_t>(i)};
  }
  for (size_t i = 0; i < model.atoms.size(); ++i) {
    const Atom& atom = model.atoms[i];
    const Result<uint64_t> size = SizeOf(model, atom);
    if (!size) continue;
    index[components[static_cast<uint32_t>(atom.parameter)]].files.push_back(
        {ComponentOf(atom), AtomIndex{static_cast<uint32_t>(i)}, *size});
  }
  for (auto& [component, directory] : index) {
    std::stable_sort(directory.files.begin(), directory.files.end(),
                     [](const auto& a, const auto& b) { return a.component < b.component; });
    const auto same = [](const auto& a, const auto& b) { return a.component == b.component; };
    directory.files.erase(std::unique(directory.files.begin(), directory.files.end(), same),
                          directory.files.end());
  }
  for (const Alias& alias : model.aliases) {
    ParamDirectory link;
    link.parameter = alias.parameter;
    link.link_target = components[static_cast<uint32_t>(alias.parameter)];
    index.try_emplace(EscapeComponent(alias.name), std::move(link));
  }
  return index;
}

Result<Plan> PlanAtomFile(const StepModel& model, AtomIndex index) {
  const Atom& atom = model.atom(index);
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  PlanBuilder builder;
  if (AsSafetensors(atom)) {
    std::vector<SafetensorsEntry> entries = EntriesOf(model, atom);
    CKPT_ASSIGN_OR_RETURN(std::string header,
                          RenderSafetensorsHeader(MetadataOf(model, atom), entries));
    builder.Literal(std::move(header));
  }
  builder.Atom(index, std::make_shared<const LocalTensor>(WholeTensor(atom.shape)), 0, elements,
               atom.dtype);
  return std::move(builder).Finish();
}

}  // namespace ckptfs
