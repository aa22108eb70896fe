// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/whole_files.h"

#include <optional>
#include <string_view>
#include <utility>

#include "core/model/source_documents.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

// Of a step that has so many blobs.
Result<SafetensorsFiles> ParseFiles(const Document& document, size_t blobs) {
  SafetensorsFiles files;
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(document));
  for (const auto& [key, value] : RootOf(tree).Items()) {
    const auto blob = key.Int();
    const auto offset = value.Int();
    const bool inside = blob && *blob >= 0 && static_cast<uint64_t>(*blob) < blobs;
    if (!inside || !offset || *offset < 0) {
      return Fail(ErrorCode::kInvalid, "document 'safetensors_files': not blobs with offsets");
    }
    files.emplace(BlobIndex{static_cast<uint32_t>(*blob)}, static_cast<uint64_t>(*offset));
  }
  return files;
}

Document Render(const SafetensorsFiles& files) {
  PickleBuilder pickle;
  std::vector<std::pair<NodeId, NodeId>> items;
  for (const auto& [blob, offset] : files) {
    const NodeId index = pickle.Int(static_cast<int64_t>(blob));
    items.emplace_back(index, pickle.Int(static_cast<int64_t>(offset)));
  }
  const NodeId root = pickle.Dict(items);
  auto printed = PrintPickle(std::move(pickle).Finish(root));
  CKPT_CHECK(printed.has_value());  // numbers
  return Document{.key = std::string(kSafetensorsFiles),
                  .scope = "",
                  .pickle = *std::move(printed),
                  .tensors = {}};
}

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

void KeepSafetensorsFiles(Assembler& assembler, const SafetensorsFiles& files) {
  if (!files.empty()) assembler.header().documents.push_back(Render(files));
}

Result<SafetensorsFiles> SafetensorsFilesOf(const StepModel& step) {
  const Document* document = step.FindDocument(kSafetensorsFiles);
  if (document == nullptr) return SafetensorsFiles();
  return ParseFiles(*document, step.blobs.size());
}

Status RenumberSafetensorsFiles(StepModel& step, std::span<const std::optional<uint32_t>> numbers) {
  for (Document& document : step.documents) {
    if (document.key != kSafetensorsFiles) continue;
    CKPT_ASSIGN_OR_RETURN(const SafetensorsFiles before, ParseFiles(document, numbers.size()));
    SafetensorsFiles files;
    for (const auto& [blob, offset] : before) {
      const auto now = numbers[static_cast<uint32_t>(blob)];
      if (!now) return Fail(ErrorCode::kInvalid, "a safetensors file that is shown is gone");
      files.emplace(BlobIndex{*now}, offset);
    }
    document = Render(files);
  }
  return {};
}

Result<std::vector<WholeFile>> WholeFilesOf(const StepModel& step,
                                            const std::vector<ShownTensor>& tensors) {
  CKPT_ASSIGN_OR_RETURN(const SafetensorsFiles kept, SafetensorsFilesOf(step));
  std::map<std::pair<std::string_view, BlobIndex>, std::map<uint64_t, size_t>> by_path;
  for (size_t i = 0; i < tensors.size() && !kept.empty(); ++i) {
    const auto place = PlaceOf(step, tensors[i]);
    if (!place || !kept.contains(place->blob)) return std::vector<WholeFile>();
    auto& by_offset = by_path[{step.blob(place->blob).path, place->blob}];
    if (!by_offset.emplace(place->offset, i).second) return std::vector<WholeFile>();
  }
  std::vector<WholeFile> files;
  for (const auto& [path, by_offset] : by_path) {
    WholeFile file{path.second, {}};
    uint64_t end = kept.at(file.blob);
    for (const auto& [offset, tensor] : by_offset) {
      if (offset != end) return std::vector<WholeFile>();
      end += tensors[tensor].bytes;
      file.tensors.push_back(tensor);
    }
    if (end != step.blob(file.blob).stamp.size) return std::vector<WholeFile>();
    files.push_back(std::move(file));
  }
  return files;
}

}  // namespace ckptfs::huggingface
