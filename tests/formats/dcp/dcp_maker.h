// SPDX-License-Identifier: Apache-2.0
//
// Makes DCP checkpoints for tests, honest or not: a `.metadata` as torch pickles it, and
// data files of one torch.save archive per chunk.  Element i of a whole tensor has the
// value that the caller's number begins with, plus i.
//
// Thread safety: none.

#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor/shape.h"
#include "formats/torch/pickle_writer.h"
#include "tests/formats/torch/zip_maker.h"

namespace ckptfs::dcp {

// A torch.save file of one fp32 tensor.
inline std::string ArchiveOf(const Shape& shape, const std::vector<float>& values,
                             std::optional<std::vector<uint64_t>> strides = std::nullopt) {
  PickleBuilder builder;
  TensorNode node;
  node.storage_key = "0";
  node.storage_elements = values.size();
  node.shape = shape;
  node.strides = strides.value_or(RowMajorStrides(shape));
  const NodeId root = builder.Tensor(node);
  const std::string pickle = PrintPickle(std::move(builder).Finish(root)).value();
  const auto view = std::as_bytes(std::span(values));
  const std::string bytes(reinterpret_cast<const char*>(view.data()), view.size());
  MadeZip zip;
  zip.records.push_back({.name = "archive/data.pkl", .payload = pickle});
  zip.records.push_back({.name = "archive/data/0", .payload = bytes});
  zip.records.push_back({.name = "archive/version", .payload = "3\n"});
  return MakeZip(zip);
}

// A torch.save file of a value without tensors.
inline std::string ObjectArchive(PickleTree tree) {
  MadeZip zip;
  zip.records.push_back({.name = "archive/data.pkl", .payload = PrintPickle(tree).value()});
  zip.records.push_back({.name = "archive/version", .payload = "3\n"});
  return MakeZip(zip);
}

inline std::string NumberArchive(int64_t number) {
  PickleBuilder builder;
  const NodeId root = builder.Int(number);
  return ObjectArchive(std::move(builder).Finish(root));
}

inline std::string NamesArchive(const std::vector<std::string>& names) {
  PickleBuilder builder;
  std::vector<NodeId> items;
  for (const std::string& name : names) items.push_back(builder.String(name));
  const NodeId root = builder.List(std::move(items));
  return ObjectArchive(std::move(builder).Finish(root));
}

struct MadeChunk {
  Shape offsets;
  Shape sizes;
  std::string file;
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct MadeEntry {
  std::string key;
  std::vector<std::string> path;  // empty: none is said; "#3" is a number
  bool tensor = true;
  std::string dtype = "float32";
  Shape shape;
  std::vector<MadeChunk> chunks;  // of an object: its place
  size_t mentions = 1;            // how often the list of chunks has each
};

class DcpMaker {
 public:
  // Chunks as {offsets, sizes, file}.
  struct Cut {
    Shape offsets;
    Shape sizes;
    std::string file;
  };
  MadeEntry& AddTensor(const std::string& key, const Shape& shape, float first,
                       const std::vector<Cut>& cuts, std::vector<std::string> path = {}) {
    MadeEntry entry{key, std::move(path), true, "float32", shape, {}};
    for (const Cut& cut : cuts) {
      entry.chunks.push_back(Place({cut.offsets, cut.sizes, cut.file},
                                   ArchiveOf(cut.sizes, Values(shape, first, cut))));
    }
    entries.push_back(std::move(entry));
    return entries.back();
  }
  MadeEntry& AddObject(const std::string& key, const std::string& archive, const std::string& file,
                       std::vector<std::string> path = {}) {
    MadeEntry entry{key, std::move(path), false, "", {}, {}};
    entry.chunks.push_back(Place({{}, {}, file}, archive));
    entries.push_back(std::move(entry));
    return entries.back();
  }
  MadeChunk Place(MadeChunk chunk, const std::string& archive) {
    std::string& file = files[chunk.file];
    chunk.offset = file.size();
    chunk.length = archive.size();
    file += archive;
    return chunk;
  }

  std::string Metadata() const;

  std::vector<MadeEntry> entries;
  std::map<std::string, std::string> files;
  std::string transform;  // of every chunk
  std::string layout = "torch.strided";
  std::string extra;  // an attribute of every _StorageInfo
  // The class of the whole.
  std::string module = "torch.distributed.checkpoint.metadata";
  std::string name = "Metadata";

 private:
  static std::vector<float> Values(const Shape& shape, float first, const Cut& cut) {
    const std::vector<uint64_t> strides = RowMajorStrides(shape);
    std::vector<float> values(ElementCount(cut.sizes).value());
    for (size_t i = 0; i < values.size(); ++i) {
      uint64_t rest = i;
      uint64_t at = 0;
      for (size_t d = shape.size(); d-- > 0;) {
        at += (cut.offsets[d] + rest % cut.sizes[d]) * strides[d];
        rest /= cut.sizes[d];
      }
      values[i] = first + static_cast<float>(at);
    }
    return values;
  }
};

// One pickle, object by object as torch's classes have them.
class MetadataPickler {
 public:
  explicit MetadataPickler(const DcpMaker& maker) : maker_(maker) {}

  std::string Run() {
    Items entries;
    Items places;
    Items paths;
    for (const MadeEntry& entry : maker_.entries) {
      entries.emplace_back(Text(entry.key),
                           entry.tensor ? Tensor(entry) : Make("BytesStorageMetadata", {}));
      for (const MadeChunk& chunk : entry.chunks) {
        places.emplace_back(Index(entry, chunk), Info(chunk));
      }
      if (entry.path.empty()) continue;
      std::vector<NodeId> path;
      for (const std::string& word : entry.path) {
        const bool number = word.starts_with('#');
        path.push_back(number ? builder_.Int(std::stoll(word.substr(1))) : Text(word));
      }
      const NodeId key = Text(entry.key);
      paths.emplace_back(key, builder_.Tuple(std::move(path)));
    }
    const NodeId planner = paths.empty() ? builder_.None() : builder_.Dict(paths);
    const NodeId root = Make(maker_.name,
                             {{"state_dict_metadata", builder_.Dict(entries)},
                              {"planner_data", planner},
                              {"storage_data", builder_.Dict(places)}},
                             maker_.module);
    return PrintPickle(std::move(builder_).Finish(root)).value();
  }

 private:
  using Items = std::vector<std::pair<NodeId, NodeId>>;
  static constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";

  NodeId Text(std::string_view text) { return builder_.String(text); }
  NodeId Make(std::string_view name, const std::vector<std::pair<std::string_view, NodeId>>& fields,
              std::string_view module = kModule) {
    const NodeId cls = builder_.Global(module, name);
    const NodeId none = builder_.Tuple({});
    if (fields.empty()) return builder_.Object(cls, none, std::nullopt);
    Items state;
    for (const auto& [field, value] : fields) state.emplace_back(Text(field), value);
    const NodeId dict = builder_.Dict(state);
    return builder_.Object(cls, none, dict);
  }
  NodeId Tensor(const MadeEntry& entry) {
    const NodeId dtype = builder_.Global("torch", entry.dtype);
    const NodeId layout = builder_.Reduce(builder_.Global("torch.serialization", "_get_layout"),
                                          builder_.Tuple({Text(maker_.layout)}));
    const NodeId format = builder_.Reduce(builder_.Global(kModule, "_MEM_FORMAT_ENCODING"),
                                          builder_.Tuple({builder_.Int(0)}));
    const NodeId state =
        builder_.Tuple({dtype, layout, builder_.Bool(false), format, builder_.Bool(false)});
    const NodeId cls = builder_.Global(kModule, "TensorProperties");
    const NodeId none = builder_.Tuple({});
    const NodeId properties = builder_.Object(cls, none, state);
    std::vector<NodeId> chunks;
    for (const MadeChunk& chunk : entry.chunks) {
      const NodeId offsets = builder_.Size(chunk.offsets);
      const NodeId sizes = builder_.Size(chunk.sizes);
      const NodeId made = Make("ChunkStorageMetadata", {{"offsets", offsets}, {"sizes", sizes}});
      chunks.insert(chunks.end(), entry.mentions, made);
    }
    const NodeId size = builder_.Size(entry.shape);
    const NodeId list = builder_.List(std::move(chunks));
    return Make("TensorStorageMetadata",
                {{"properties", properties}, {"size", size}, {"chunks", list}});
  }
  NodeId Index(const MadeEntry& entry, const MadeChunk& chunk) {
    const NodeId name = Text(entry.key);
    const NodeId hint = builder_.None();
    if (!entry.tensor) return Make("MetadataIndex", {{"fqn", name}, {"index", hint}});
    const NodeId offset = builder_.Size(chunk.offsets);
    return Make("MetadataIndex", {{"fqn", name}, {"index", hint}, {"offset", offset}});
  }
  NodeId Info(const MadeChunk& chunk) {
    std::vector<std::pair<std::string_view, NodeId>> fields = {
        {"relative_path", Text(chunk.file)},
        {"offset", builder_.Int(static_cast<int64_t>(chunk.offset))},
        {"length", builder_.Int(static_cast<int64_t>(chunk.length))}};
    if (!maker_.transform.empty()) {
      fields.emplace_back("transform_descriptors", builder_.List({Text(maker_.transform)}));
    }
    if (!maker_.extra.empty()) fields.emplace_back(maker_.extra, builder_.None());
    return Make("_StorageInfo", fields, "torch.distributed.checkpoint.filesystem");
  }

  const DcpMaker& maker_;
  PickleBuilder builder_;
};

inline std::string DcpMaker::Metadata() const { return MetadataPickler(*this).Run(); }

}  // namespace ckptfs::dcp
