// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/metadata.h"

#include <algorithm>
#include <compare>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/torch/pickle/machine.h"
#include "formats/torch/pickle/packed_values.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kOldModule = "torch.distributed._shard.sharded_tensor.metadata";

// A Metadata of megatron-core up to 0.15 (dist_checkpointing/strategies/torch.py).
constexpr std::string_view kMcoreModule = "megatron.core.dist_checkpointing.strategies.torch";

enum Schema : size_t {
  kMetadata,
  kMcoreMetadata,
  kTensor,
  kChunk,
  kBytes,
  kIndex,
  kInfo,
  kProperties,
  kOldProperties
};

const std::vector<PackedSchema>& Schemas() {
  static const std::vector<std::string_view> properties = {"dtype", "layout", "requires_grad",
                                                           "memory_format", "pin_memory"};
  static const std::vector<std::string_view> metadata = {
      "state_dict_metadata", "planner_data", "storage_data", "all_local_plans", "mcore_data"};
  static const std::vector<PackedSchema> schemas = {
      {kModule, "Metadata", metadata, true},
      {kMcoreModule, "MCoreMetadata", metadata, true},
      {kModule, "TensorStorageMetadata", {"properties", "size", "chunks"}},
      {kModule, "ChunkStorageMetadata", {"offsets", "sizes"}},
      {kModule, "BytesStorageMetadata", {}},
      {kModule, "MetadataIndex", {"fqn", "offset", "index"}},
      {"torch.distributed.checkpoint.filesystem",
       "_StorageInfo",
       {"relative_path", "offset", "length", "transform_descriptors"}},
      {kModule, "TensorProperties", properties},
      {kOldModule, "TensorProperties", properties},
  };
  return schemas;
}

// The objects of the pickle as they come, a few words each.
class Objects : public PackedListener {
 public:
  using Fields = std::span<const PackedValue>;
  struct Tensor {
    PackedValue properties, size, chunks;
  };
  struct Chunk {
    PackedValue offsets, sizes;
  };
  struct Index {
    PackedValue fqn, offset;
  };
  struct Info {
    PackedValue path;
    uint64_t offset = 0;
    uint64_t length = 0;
  };

  Result<uint32_t> Built(size_t schema, Fields fields, const PackedValues& values) override;

  std::vector<std::vector<PackedValue>> metadata;
  std::vector<Tensor> tensors;
  std::vector<Chunk> chunks;
  std::vector<Index> indexes;
  std::vector<Info> infos;
  std::vector<DType> dtypes;  // of properties

 private:
  template <class T>
  static uint32_t Keep(std::vector<T>& all, T one) {
    all.push_back(std::move(one));
    return static_cast<uint32_t>(all.size() - 1);
  }
  Result<uint32_t> AddInfo(Fields fields, const PackedValues& values);
  Result<uint32_t> AddProperties(Fields fields, const PackedValues& values);
};

Result<uint32_t> Objects::Built(size_t schema, Fields fields, const PackedValues& values) {
  switch (schema) {
    case kMetadata:
    case kMcoreMetadata: return Keep(metadata, {fields.begin(), fields.end()});
    case kTensor: return Keep(tensors, Tensor{fields[0], fields[1], fields[2]});
    case kChunk: return Keep(chunks, Chunk{fields[0], fields[1]});
    case kIndex: return Keep(indexes, Index{fields[0], fields[1]});
    case kInfo: return AddInfo(fields, values);
    default: return AddProperties(fields, values);
  }
}

Result<uint32_t> Objects::AddInfo(Fields fields, const PackedValues& values) {
  const auto offset = values.IntOf(fields[1]);
  const auto length = values.IntOf(fields[2]);
  if (!values.StringOf(fields[0]) || !offset || !length || *offset < 0 || *length < 0) {
    return Refuse("a _StorageInfo does not have a valid path, offset and length");
  }
  const PackedValue transforms = fields[3];
  const bool none = transforms.kind() == PackedValue::Kind::kAbsent ||
                    transforms.kind() == PackedValue::Kind::kNone;
  const auto names = values.SequenceOf(transforms);
  if (!none && !(names && names->empty())) {
    const auto first = names ? values.StringOf(names->front()) : std::nullopt;
    const std::string_view name = first.value_or("?");
    const std::string how = name.starts_with("stream.zstd")
                                ? StrCat("is compressed with zstd ('", name, "')")
                                : StrCat("was written through a transform ('", name, "')");
    return Fail(ErrorCode::kUnsupported,
                StrCat("the data in ", *values.StringOf(fields[0]), " ", how,
                       ", which ckptfs does not read: load it with torch.distributed.checkpoint "
                       "and save "
                       "it again without _extensions"));
  }
  return Keep(infos,
              Info{fields[0], static_cast<uint64_t>(*offset), static_cast<uint64_t>(*length)});
}

Result<uint32_t> Objects::AddProperties(Fields fields, const PackedValues& values) {
  const auto name = values.GlobalOf(fields[0]);
  constexpr std::string_view kTorch = "torch\n";
  const auto dtype = name && name->starts_with(kTorch) ? DTypeFromTorch(name->substr(kTorch.size()))
                                                       : std::nullopt;
  if (!dtype) return Fail(ErrorCode::kUnsupported, "a tensor of a dtype that is not known");
  const auto layout = values.StringOf(fields[1]);
  if (layout != "torch.strided") {
    return Fail(ErrorCode::kUnsupported,
                StrCat("a tensor of layout ", layout.value_or("?"), ", not torch.strided"));
  }
  return Keep(dtypes, *dtype);
}

// Makes the result of what the objects say of each other.
class Resolver {
 public:
  Resolver(const PackedValues& values, const Objects& objects)
      : values_(values), objects_(objects) {}

  Result<DcpMetadata> Run(PackedValue root);

 private:
  using Items = std::span<const PackedValue>;

  Status AddEntries(Items entries);
  Status AddTensor(std::string_view name, const Objects::Tensor& tensor);
  Status ChargeChunks(size_t chunks) const;
  Status AddBox(const TensorEntry& tensor, const Objects::Chunk& chunk);
  Status AddPlaces(Items places);
  Status Place(const Objects::Index& index, const Objects::Info& info);
  Status PlaceChunk(const TensorEntry& tensor, const Objects::Index& index, StoredExtent extent);
  Status CheckPlaces() const;
  Status AddPaths(Items paths);
  Result<std::vector<PathElement>> PathOf(std::string_view name, PackedValue value);
  uint32_t FileOf(PackedValue path);
  void SortChunks();
  bool Empty(const TensorEntry& tensor, size_t chunk) const;

  static constexpr uint64_t kNowhere = ~uint64_t{0};
  static constexpr uint64_t kPathsPerName = 4;
  static constexpr uint64_t kPathsAlways = uint64_t{1} << 20;
  static constexpr uint32_t kObject = uint32_t{1} << 31;

  const PackedValues& values_;
  const Objects& objects_;
  DcpMetadata out_;
  std::unordered_map<uint32_t, uint32_t> entries_;  // string number -> tensor, kObject | object
  std::unordered_map<uint32_t, uint32_t> files_;    // string number -> place in files
  std::vector<uint32_t> sorted_;  // chunks of each tensor by their offsets, the empty ones last
  size_t places_ = 0;             // of storage_data
  uint64_t names_ = 0;            // bytes of the entries' names
  uint64_t paths_ = 0;            // elements of paths, and bytes of their text
};

bool Resolver::Empty(const TensorEntry& tensor, size_t chunk) const {
  const auto sizes = out_.SizesOf(tensor, chunk);
  return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

Result<DcpMetadata> Resolver::Run(PackedValue root) {
  auto number = values_.ObjectOf(root, kMetadata);
  if (!number) number = values_.ObjectOf(root, kMcoreMetadata);
  if (!number) return Refuse("not a DCP metadata file: its pickle is not a Metadata");
  const auto& fields = objects_.metadata[*number];
  out_.megatron = fields[3].kind() != PackedValue::Kind::kAbsent ||
                  fields[4].kind() != PackedValue::Kind::kAbsent;
  const auto entries = values_.DictOf(fields[0]);
  const auto places = values_.DictOf(fields[2]);
  if (!entries || !places) return Refuse("its state_dict_metadata or its storage_data is missing");
  places_ = places->size() / 2;
  CKPT_RETURN_IF_ERROR(AddEntries(*entries));
  SortChunks();
  CKPT_RETURN_IF_ERROR(AddPlaces(*places));
  CKPT_RETURN_IF_ERROR(CheckPlaces());
  out_.tensor_paths.resize(out_.tensors.size());
  out_.object_paths.resize(out_.objects.size());
  if (const auto paths = values_.DictOf(fields[1])) CKPT_RETURN_IF_ERROR(AddPaths(*paths));
  return std::move(out_);
}

Status Resolver::AddEntries(Items entries) {
  for (size_t i = 0; i < entries.size(); i += 2) {
    const auto name = values_.StringOf(entries[i]);
    if (!name || name->empty()) return Refuse("an entry without a name");
    const PackedValue value = entries[i + 1];
    uint32_t number = static_cast<uint32_t>(out_.tensors.size());
    if (const auto tensor = values_.ObjectOf(value, kTensor)) {
      if (Status added = AddTensor(*name, objects_.tensors[*tensor]); !added) {
        return Fail(std::move(added).error().WithContext(StrCat("'", *name, "'")));
      }
    } else if (values_.ObjectOf(value, kBytes)) {
      number = kObject | static_cast<uint32_t>(out_.objects.size());
      out_.objects.push_back(ObjectEntry{std::string(*name), {0, kNowhere, 0}});
    } else {
      return Refuse("'", *name, "' is neither a tensor's nor an object's metadata");
    }
    if (!entries_.emplace(values_.StringNumber(entries[i]), number).second) {
      return Refuse("'", *name, "' is there twice");
    }
    names_ += name->size();
  }
  return {};
}

Status Resolver::AddTensor(std::string_view name, const Objects::Tensor& tensor) {
  TensorEntry entry;
  entry.name = name;
  auto properties = values_.ObjectOf(tensor.properties, kProperties);
  if (!properties) properties = values_.ObjectOf(tensor.properties, kOldProperties);
  if (!properties) return Refuse("no properties");
  entry.dtype = objects_.dtypes[*properties];
  const auto shape = values_.ShapeOf(tensor.size);
  if (!shape) return Refuse("its size is not one");
  CKPT_RETURN_IF_ERROR(ElementCount(*shape));
  entry.shape = *shape;
  const auto chunks = values_.SequenceOf(tensor.chunks);
  if (!chunks) return Refuse("no list of chunks");
  CKPT_RETURN_IF_ERROR(ChargeChunks(chunks->size()));
  entry.first_chunk = out_.chunks.size();
  entry.chunk_count = chunks->size();
  entry.first_word = out_.boxes.size();
  for (const PackedValue value : *chunks) {
    const auto chunk = values_.ObjectOf(value, kChunk);
    if (!chunk) return Refuse("a chunk that is not one");
    CKPT_RETURN_IF_ERROR(AddBox(entry, objects_.chunks[*chunk]));
  }
  out_.chunks.resize(entry.first_chunk + entry.chunk_count, StoredExtent{0, kNowhere, 0});
  out_.tensors.push_back(std::move(entry));
  return {};
}

// A chunk with elements has a place of its own, and one without is an object of its own: ranks
// that have nothing of a tensor say so each, at one place.
Status Resolver::ChargeChunks(size_t chunks) const {
  const size_t most = places_ + objects_.chunks.size();
  if (chunks <= most - out_.chunks.size()) return {};
  return Refuse("with it the tensors have more than ", most, " chunks, though the file describes ",
                objects_.chunks.size(), " and storage_data has ", places_, " places");
}

Status Resolver::AddBox(const TensorEntry& tensor, const Objects::Chunk& chunk) {
  const auto offsets = values_.SequenceOf(chunk.offsets);
  const auto sizes = values_.SequenceOf(chunk.sizes);
  const size_t rank = tensor.shape.size();
  if (!offsets || !sizes || offsets->size() != rank || sizes->size() != rank) {
    return Refuse("a chunk that does not have the tensor's ", rank, " dimensions");
  }
  for (size_t d = 0; d < rank; ++d) {
    const int64_t begin = values_.IntOf((*offsets)[d]).value_or(-1);
    const int64_t size = values_.IntOf((*sizes)[d]).value_or(-1);
    if (begin < 0 || size < 0 ||
        !RangeInside(static_cast<uint64_t>(begin), static_cast<uint64_t>(size), tensor.shape[d])) {
      return Refuse("a chunk at ", begin, " of size ", size, " lies beyond the ", tensor.shape[d],
                    " elements of dimension ", d);
    }
  }
  for (const PackedValue value : *offsets)
    out_.boxes.push_back(static_cast<uint64_t>(value.integer()));
  for (const PackedValue value : *sizes)
    out_.boxes.push_back(static_cast<uint64_t>(value.integer()));
  return {};
}

// A place names its chunk by where it begins.
void Resolver::SortChunks() {
  sorted_.resize(out_.chunks.size());
  for (const TensorEntry& tensor : out_.tensors) {
    const auto begin = sorted_.begin() + static_cast<ptrdiff_t>(tensor.first_chunk);
    const auto end = begin + static_cast<ptrdiff_t>(tensor.chunk_count);
    std::iota(begin, end, uint32_t{0});
    const auto less = [&](uint32_t a, uint32_t b) {
      const auto left = out_.OffsetsOf(tensor, a);
      const auto right = out_.OffsetsOf(tensor, b);
      const auto order = std::lexicographical_compare_three_way(left.begin(), left.end(),
                                                                right.begin(), right.end());
      if (order != 0) return order < 0;
      return !Empty(tensor, a) && Empty(tensor, b);
    };
    if (!std::is_sorted(begin, end, less)) std::stable_sort(begin, end, less);
  }
}

uint32_t Resolver::FileOf(PackedValue path) {
  const auto [at, added] =
      files_.try_emplace(values_.StringNumber(path), static_cast<uint32_t>(out_.files.size()));
  if (added) out_.files.emplace_back(*values_.StringOf(path));
  return at->second;
}

Status Resolver::AddPlaces(Items places) {
  for (size_t i = 0; i < places.size(); i += 2) {
    const auto index = values_.ObjectOf(places[i], kIndex);
    const auto info = values_.ObjectOf(places[i + 1], kInfo);
    if (!index || !info)
      return Refuse(
          "storage_data holds an item that is not an index and its "
          "place");
    CKPT_RETURN_IF_ERROR(Place(objects_.indexes[*index], objects_.infos[*info]));
  }
  return {};
}

Status Resolver::Place(const Objects::Index& index, const Objects::Info& info) {
  const auto name = values_.StringOf(index.fqn);
  const auto entry = name ? entries_.find(values_.StringNumber(index.fqn)) : entries_.end();
  if (entry == entries_.end()) {
    return Refuse("storage_data has a place of '", name.value_or("?"),
                  "', which state_dict_metadata does not have");
  }
  const StoredExtent extent{FileOf(info.path), info.offset, info.length};
  if ((entry->second & kObject) == 0) {
    return PlaceChunk(out_.tensors[entry->second], index, extent);
  }
  StoredExtent& object = out_.objects[entry->second & ~kObject].extent;
  if (object.offset != kNowhere) return Refuse("'", *name, "' has two places");
  object = extent;
  return {};
}

Status Resolver::PlaceChunk(const TensorEntry& tensor, const Objects::Index& index,
                            StoredExtent extent) {
  const auto offset = values_.ShapeOf(index.offset);
  const auto begin = sorted_.begin() + static_cast<ptrdiff_t>(tensor.first_chunk);
  const auto end = begin + static_cast<ptrdiff_t>(tensor.chunk_count);
  const Shape wanted = offset.value_or(Shape());
  if (wanted.size() == tensor.shape.size()) {
    const auto before = [&](uint32_t chunk, const Shape& key) {
      const auto at = out_.OffsetsOf(tensor, chunk);
      return std::lexicographical_compare(at.begin(), at.end(), key.begin(), key.end());
    };
    const auto found = std::lower_bound(begin, end, wanted, before);
    if (found != end && std::ranges::equal(out_.OffsetsOf(tensor, *found), wanted)) {
      // Parts without elements may begin where another part does, or where others of them do.
      if (Empty(tensor, *found)) return {};
      StoredExtent& place = out_.chunks[tensor.first_chunk + *found];
      if (place.offset != kNowhere) {
        return Refuse("'", tensor.name, "': the chunk at ", ShapeToString(wanted),
                      " has two places");
      }
      place = extent;
      return {};
    }
  }
  return Refuse("'", tensor.name, "': storage_data has a place at ", ShapeToString(wanted),
                ", where no chunk begins");
}

Status Resolver::CheckPlaces() const {
  for (const ObjectEntry& object : out_.objects) {
    if (object.extent.offset == kNowhere) return Refuse("'", object.name, "' is stored nowhere");
  }
  for (const TensorEntry& tensor : out_.tensors) {
    for (size_t i = 0; i < tensor.chunk_count; ++i) {
      if (out_.chunks[tensor.first_chunk + i].offset != kNowhere || Empty(tensor, i)) continue;
      const auto at = out_.OffsetsOf(tensor, i);
      return Refuse("'", tensor.name, "': the chunk at ", ShapeToString({at.begin(), at.end()}),
                    " is stored nowhere");
    }
  }
  return {};
}

// A name is made of its path, so that all paths have about as much text as the names.
Result<std::vector<PathElement>> Resolver::PathOf(std::string_view name, PackedValue value) {
  const auto elements = values_.SequenceOf(value);
  if (!elements) return Refuse("planner_data of '", name, "' is not a path");
  if (elements->size() > kMaxPathElements) {
    return Refuse("planner_data of '", name, "' has ", elements->size(),
                  " elements, and the path of a state dict at most ", kMaxPathElements);
  }
  std::vector<PathElement> path;
  size_t bytes = 0;
  for (const PackedValue element : *elements) {
    const auto text = values_.StringOf(element);
    const auto index = values_.IntOf(element);
    if (!text && !index) return Refuse("planner_data of '", name, "' is not a path");
    bytes += text.value_or("").size();
    if (bytes > kMaxPathText) {
      return Refuse("planner_data of '", name, "' has more than ", kMaxPathText,
                    " bytes of text, and the path of a state dict at most as many");
    }
    path.push_back(text ? PathElement{std::string(*text), false}
                        : PathElement{std::to_string(*index), true});
  }
  paths_ += bytes + path.size();
  if (paths_ > kPathsPerName * names_ + kPathsAlways) {
    return Refuse("the paths of planner_data are more than ", kPathsPerName,
                  " times as long as the names that are made of them");
  }
  return path;
}

Status Resolver::AddPaths(Items paths) {
  for (size_t i = 0; i < paths.size(); i += 2) {
    if (!values_.StringOf(paths[i]))
      return Refuse(
          "planner_data has a key that is not a name of "
          "an entry");
    const auto entry = entries_.find(values_.StringNumber(paths[i]));
    if (entry == entries_.end()) continue;
    CKPT_ASSIGN_OR_RETURN(std::vector<PathElement> path,
                          PathOf(*values_.StringOf(paths[i]), paths[i + 1]));
    out_.has_paths = true;
    const bool object = (entry->second & kObject) != 0;
    auto& all = object ? out_.object_paths : out_.tensor_paths;
    all[entry->second & ~kObject] = std::move(path);
  }
  return {};
}

}  // namespace

Result<DcpMetadata> ReadMetadata(const File& file) {
  if (file.size() > kMaxMetadataBytes) {
    return Fail(ErrorCode::kUnsupported, StrCat(file.name(), ": exceeds 2 GiB"));
  }
  Objects objects;
  PackedValues values(Schemas(), objects);
  PackedValue root;
  {
    PickleInput input(file);
    auto read = PickleMachine(input, values).Run();  // its memo is gone after it
    if (!read) return Fail(std::move(read).error().WithContext(file.name()));
    root = *read;
  }
  auto resolved = Resolver(values, objects).Run(root);
  if (!resolved) return Fail(std::move(resolved).error().WithContext(file.name()));
  return resolved;
}

namespace {

// A tensor of one part, by their numbers.
struct Member {
  size_t part = 0;
  size_t tensor = 0;
};

Status AddMembers(const std::vector<DcpMetadata>& parts, const std::vector<uint32_t>& first_file,
                  std::span<const Member> members, DcpMetadata& out) {
  const TensorEntry& first = parts[members[0].part].tensors[members[0].tensor];
  TensorEntry merged{first.name, first.dtype, first.shape, out.chunks.size(), 0, out.boxes.size()};
  for (const Member& member : members) {
    const DcpMetadata& part = parts[member.part];
    const TensorEntry& tensor = part.tensors[member.tensor];
    if (tensor.dtype != first.dtype || tensor.shape != first.shape) {
      return Refuse("'", first.name, "' is ", DTypeName(first.dtype), " ",
                    ShapeToString(first.shape), " on one rank and ", DTypeName(tensor.dtype), " ",
                    ShapeToString(tensor.shape), " on another");
    }
    const auto words =
        std::span(part.boxes)
            .subspan(tensor.first_word, 2 * tensor.shape.size() * tensor.chunk_count);
    out.boxes.insert(out.boxes.end(), words.begin(), words.end());
    for (size_t i = 0; i < tensor.chunk_count; ++i) {
      StoredExtent extent = part.chunks[tensor.first_chunk + i];
      extent.file += first_file[member.part];
      out.chunks.push_back(extent);
    }
    merged.chunk_count += tensor.chunk_count;
  }
  const Member& one = members[0];
  out.tensor_paths.push_back(parts[one.part].tensor_paths[one.tensor]);
  out.tensors.push_back(std::move(merged));
  return {};
}

}  // namespace

Result<DcpMetadata> MergeMetadata(std::vector<DcpMetadata> parts) {
  if (parts.size() == 1) return std::move(parts[0]);
  DcpMetadata out;
  std::vector<uint32_t> first_file;
  std::vector<std::vector<Member>> tensors;
  std::unordered_map<std::string_view, size_t> known;
  std::unordered_map<std::string_view, size_t> objects;
  for (size_t p = 0; p < parts.size(); ++p) {
    const DcpMetadata& part = parts[p];
    first_file.push_back(static_cast<uint32_t>(out.files.size()));
    out.files.insert(out.files.end(), part.files.begin(), part.files.end());
    out.has_paths |= part.has_paths;
    out.megatron |= part.megatron;
    for (uint32_t i = 0; i < part.files.size(); ++i) out.plain.push_back(part.IsPlain(i));
    for (size_t i = 0; i < part.tensors.size(); ++i) {
      const auto [at, added] = known.try_emplace(part.tensors[i].name, tensors.size());
      if (added) tensors.emplace_back();
      tensors[at->second].push_back({p, i});
    }
    for (size_t i = 0; i < part.objects.size(); ++i) {
      if (!objects.try_emplace(part.objects[i].name, i).second) {
        ++out.dropped_objects;
        continue;
      }
      ObjectEntry object = part.objects[i];
      object.extent.file += first_file[p];
      out.objects.push_back(std::move(object));
      out.object_paths.push_back(part.object_paths[i]);
    }
  }
  for (const auto& members : tensors) {
    if (objects.contains(parts[members[0].part].tensors[members[0].tensor].name)) {
      return Refuse("'", parts[members[0].part].tensors[members[0].tensor].name,
                    "' is a tensor on one rank and an object on another");
    }
    CKPT_RETURN_IF_ERROR(AddMembers(parts, first_file, members, out));
  }
  return out;
}

}  // namespace ckptfs::dcp
