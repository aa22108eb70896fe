// SPDX-License-Identifier: Apache-2.0

#include "snapshot/capture.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/base/strings.h"
#include "core/ingest/rank_file.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

std::string KeyOf(const CapturedTensor& tensor) {
  if (!tensor.key.empty()) return tensor.key;
  std::string key = tensor.parameter;
  if (tensor.kind != "weight") key = StrCat(tensor.kind, "/", key);
  if (!tensor.optimizer.empty()) key = StrCat(tensor.optimizer, "/", key);
  return key;
}

Json PiecesOf(const StatePart& part) {
  Json pieces = Json::array();
  for (const StateBox& piece : part.pieces) {
    Json box = Json::array();
    for (size_t d = 0; d < piece.begin.size(); ++d) {
      box.push_back(Json::array({piece.begin[d], piece.end[d]}));
    }
    pieces.push_back({{"box", std::move(box)}, {"at", piece.at}});
  }
  return pieces;
}

Json TensorsOf(const Capture& capture) {
  Json tensors = Json::object();
  for (const CapturedTensor& tensor : capture.tensors) {
    if (tensor.parameter.empty()) continue;
    Json& json = tensors[tensor.key] = Json{{"parameter", tensor.parameter},
                                            {"kind", tensor.kind},
                                            {"optimizer", tensor.optimizer},
                                            {"number", tensor.number}};
    if (!tensor.part) continue;
    json["shape"] = tensor.part->shape;
    if (!tensor.part->pieces.empty()) json["pieces"] = PiecesOf(*tensor.part);
    if (tensor.part->flat) json["flat"] = *tensor.part->flat;
    if (tensor.part->local_shape) json["local_shape"] = *tensor.part->local_shape;
  }
  return tensors;
}

// kInvalid if a text is not UTF-8.
Result<std::string> EntryOf(const Capture& capture, uint32_t rank, uint32_t world) {
  Json entry{{"version", kRankFileVersion},
             {"rank", rank},
             {"world", world},
             {"step", capture.step},
             {"framework", capture.framework},
             {"framework_version", capture.framework_version}};
  if (!capture.layout.empty()) entry["layout"] = capture.layout;
  entry["tensors"] = TensorsOf(capture);
  if (!capture.parameters.empty()) {
    Json& parameters = entry["parameters"] = Json::array();
    for (const CapturedParameter& parameter : capture.parameters) {
      parameters.push_back({{"name", parameter.name}, {"role", parameter.role}});
    }
    entry["aliases"] = Json::array();
    for (const auto& [alias, name] : capture.aliases) {
      entry["aliases"].push_back(Json::array({alias, name}));
    }
    entry["groups"] = Json::array();
    for (const CapturedGroup& group : capture.groups) {
      entry["groups"].push_back({{"optimizer", group.optimizer},
                                 {"parameters", group.parameters},
                                 {"pickle", group.pickle}});
    }
  }
  Json& documents = entry["documents"] = Json::array();
  for (const CapturedDocument& document : capture.documents) {
    documents.push_back({{"key", document.key},
                         {"scope", document.scope},
                         {"pickle", document.pickle},
                         {"tensors", document.tensors}});
  }
  for (const auto& [digest, ranks] : capture.alike) {
    entry["alike"].push_back(Json::array({digest, ranks}));
  }
  try {
    return entry.dump();
  } catch (const Json::exception&) {
    return Fail(ErrorCode::kInvalid, "snapshot: a name is not UTF-8");
  }
}

// The widest first, so that each lies aligned; of one width those that are copied
// at once together.
void Arrange(std::vector<CapturedTensor>& tensors) {
  std::stable_sort(
      tensors.begin(), tensors.end(), [](const CapturedTensor& a, const CapturedTensor& b) {
        return std::pair(BitWidth(b.dtype), a.lazy) < std::pair(BitWidth(a.dtype), b.lazy);
      });
}

}  // namespace

Result<CaptureFile> CaptureFile::Make(Capture capture, uint32_t rank, uint32_t world) {
  CaptureFile file;
  Arrange(capture.tensors);
  std::vector<SafetensorsEntry> entries;
  std::set<std::string> keys;
  for (CapturedTensor& tensor : capture.tensors) {
    tensor.key = KeyOf(tensor);
    if (!keys.insert(tensor.key).second) {
      return Fail(ErrorCode::kInvalid, StrCat("snapshot: two tensors '", tensor.key, "'"));
    }
    if (tensor.part) {
      auto checked = LocalRangeOf(*tensor.part, tensor.shape);
      if (!checked) return Fail(std::move(checked).error().WithContext("snapshot: " + tensor.key));
    }
    entries.push_back({tensor.key, tensor.dtype, tensor.shape, 0, 0});
  }
  CKPT_ASSIGN_OR_RETURN(std::string entry, EntryOf(capture, rank, world));
  CKPT_ASSIGN_OR_RETURN(
      std::string header,
      RenderSafetensorsHeader({{"format", "pt"}, {kRankFileKey, std::move(entry)}}, entries));
  file.header_ = std::make_shared<const std::string>(std::move(header));
  const auto text = std::as_bytes(std::span(*file.header_));
  file.parts_.push_back({0, text.size(), text.data(), false});
  for (size_t i = 0; i < entries.size(); ++i) {
    const CapturedTensor& tensor = capture.tensors[i];
    if (entries[i].end == entries[i].begin) continue;
    file.parts_.push_back(
        {text.size() + entries[i].begin, text.size() + entries[i].end, tensor.from, tensor.lazy,
         tensor.device});
  }
  file.bytes_ = file.parts_.back().end;
  file.capture_ = std::move(capture);
  return file;
}

std::vector<CopyRun> CaptureFile::Runs(uint64_t begin, uint64_t end, bool lazy) const {
  std::vector<CopyRun> runs;
  auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                               [](uint64_t at, const Part& p) { return at < p.end; });
  for (; part != parts_.end() && part->begin < end; ++part) {
    if (part->lazy != lazy) continue;
    const uint64_t from = std::max(begin, part->begin);
    const uint64_t to = std::min(end, part->end);
    runs.push_back({part->from + (from - part->begin), from, to - from, part->device});
  }
  return runs;
}

std::string CaptureFile::KeyAt(uint64_t at) const {
  const auto part = std::upper_bound(parts_.begin(), parts_.end(), at,
                                     [](uint64_t byte, const Part& p) { return byte < p.end; });
  if (part == parts_.end()) return "";
  const auto tensor = std::ranges::find(capture_.tensors, part->from, &CapturedTensor::from);
  return tensor == capture_.tensors.end() ? "" : tensor->key;
}

}  // namespace ckptfs
