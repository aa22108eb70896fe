// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/whole_files.h"

#include <map>
#include <optional>
#include <string_view>
#include <utility>

namespace ckptfs::huggingface {
namespace {

// Where it lies in one piece, as it is shown; a tensor without elements lies nowhere.
std::optional<Fragment> PlaceOf(const StepModel& step, const ShownTensor& tensor) {
  const Atom& atom = step.atom(tensor.atom);
  const Gather* gather = GatherCopied(atom.source);
  const bool own_name = tensor.name == step.parameter(atom.parameter).name;
  if (!own_name || gather == nullptr || gather->locals.size() != 1 || gather->series.size() != 1 ||
      gather->locals.front() != *tensor.local) {
    return std::nullopt;
  }
  const FragmentSeries& series = gather->series.front();
  if (series.elements != tensor.elements || series.dtype != tensor.dtype) return std::nullopt;
  return series.At(0);
}

}  // namespace

std::vector<WholeFile> WholeFilesOf(const StepModel& step,
                                    const std::vector<ShownTensor>& tensors) {
  const auto& kept = step.facts.safetensors;
  std::map<std::pair<std::string_view, BlobIndex>, std::map<uint64_t, size_t>> by_path;
  for (size_t i = 0; i < tensors.size() && !kept.empty(); ++i) {
    const auto place = PlaceOf(step, tensors[i]);
    if (!place || !kept.contains(place->blob)) return {};
    auto& by_offset = by_path[{step.blob(place->blob).path, place->blob}];
    if (!by_offset.emplace(place->offset, i).second) return {};
  }
  std::vector<WholeFile> files;
  for (const auto& [path, by_offset] : by_path) {
    WholeFile file{path.second, {}};
    uint64_t end = kept.at(file.blob);
    for (const auto& [offset, tensor] : by_offset) {
      if (offset != end) return {};
      end += tensors[tensor].bytes;
      file.tensors.push_back(tensor);
    }
    if (end != step.blob(file.blob).stamp.size) return {};
    files.push_back(std::move(file));
  }
  return files;
}

}  // namespace ckptfs::huggingface
