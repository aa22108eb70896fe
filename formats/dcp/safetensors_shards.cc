// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/safetensors_shards.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/json_text.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"

namespace ckptfs::dcp {
namespace {

constexpr const char* kShardingKey = "DCP_SHARDING_INFO";

// One tensor of one file.
struct Shard {
  uint32_t file = 0;
  DType dtype = DType::kF32;
  Shape offsets;
  Shape sizes;
  uint64_t begin = 0;
  uint64_t length = 0;
};

Result<SafetensorsHeader> HeaderOf(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  if (file->size() < 8) return Refuse(file->name(), ": safetensors: shorter than its length field");
  CKPT_ASSIGN_OR_RETURN(const std::string first, file->Read(0, 8, "the header's length"));
  CKPT_ASSIGN_OR_RETURN(const uint64_t length, SafetensorsHeaderLength(first, file->size()));
  CKPT_ASSIGN_OR_RETURN(const std::string head, file->Read(0, 8 + length, "the header"));
  return ParseSafetensorsHeader(head, file->size());
}

class ShardReader {
 public:
  Status AddWhole(uint32_t number, const SafetensorsHeader& header) {
    const auto format = header.metadata.find("format");
    if (format != header.metadata.end() && format->second != "pt" && format->second != "mlx") {
      return Refuse("its __metadata__ says format '", format->second, "', which is not torch's");
    }
    for (const SafetensorsEntry& entry : header.entries) {
      if (!known_.emplace(entry.name, tensors_.size()).second) {
        return Refuse("'", entry.name, "' is in another file of the directory, too");
      }
      tensors_.emplace_back(
          entry.name,
          std::vector<Shard>{{number, entry.dtype, Shape(entry.shape.size(), 0), entry.shape,
                              header.data_offset + entry.begin, entry.end - entry.begin}});
    }
    return {};
  }

  Status Add(uint32_t number, const SafetensorsHeader& header) {
    const auto text = header.metadata.find(kShardingKey);
    if (text == header.metadata.end())
      return Refuse(
          "it does not "
          "have ",
          kShardingKey, ", though others do");
    if (HasNul(text->second)) return Refuse(kShardingKey, ": it holds a NUL byte");
    const auto json = nlohmann::json::parse(text->second, nullptr, false);
    if (!json.is_object()) return Refuse(kShardingKey, " is not a JSON object");
    for (const SafetensorsEntry& entry : header.entries) {
      CKPT_ASSIGN_OR_RETURN(Shape offsets, OffsetsOf(json, entry));
      const auto [at, added] = known_.try_emplace(entry.name, tensors_.size());
      if (added) tensors_.emplace_back(entry.name, std::vector<Shard>());
      tensors_[at->second].second.push_back({number, entry.dtype, std::move(offsets), entry.shape,
                                             header.data_offset + entry.begin,
                                             entry.end - entry.begin});
    }
    return {};
  }

  Result<DcpMetadata> Finish(const std::vector<std::string>& files) {
    DcpMetadata out;
    out.files = files;
    out.plain.assign(files.size(), true);
    for (const auto& [name, shards] : tensors_) CKPT_RETURN_IF_ERROR(AddTensor(name, shards, out));
    out.tensor_paths.resize(out.tensors.size());
    return out;
  }

 private:
  static Result<Shape> OffsetsOf(const nlohmann::json& json, const SafetensorsEntry& entry) {
    const auto rule = [&](std::string_view what) {
      return Refuse(kShardingKey, ": '", entry.name, "': ", what);
    };
    const auto info = json.find(entry.name);
    if (info == json.end() || !info->is_object()) return rule("nothing says where it begins");
    const auto saved = info->find("saved_offsets");
    if (saved == info->end() || !saved->is_array() || saved->size() != entry.shape.size()) {
      return rule("saved_offsets does not list one offset for each dimension");
    }
    Shape offsets;
    for (size_t d = 0; d < saved->size(); ++d) {
      const auto& offset = (*saved)[d];
      if (!offset.is_number_unsigned()) return rule("an offset is not a whole number");
      offsets.push_back(offset.get<uint64_t>());
      CKPT_RETURN_IF_ERROR(CheckedAdd(offsets.back(), entry.shape[d], "a shard's end"));
    }
    return offsets;
  }

  static Status AddTensor(const std::string& name, const std::vector<Shard>& shards,
                          DcpMetadata& out) {
    TensorEntry tensor{name,          shards[0].dtype, shards[0].sizes, out.chunks.size(),
                       shards.size(), out.boxes.size()};
    std::fill(tensor.shape.begin(), tensor.shape.end(), 0);
    for (const Shard& shard : shards) {
      if (shard.dtype != tensor.dtype || shard.sizes.size() != tensor.shape.size()) {
        return Refuse("'", name, "' has another dtype or rank in ", out.files[shard.file]);
      }
      for (size_t d = 0; d < tensor.shape.size(); ++d) {
        tensor.shape[d] = std::max(tensor.shape[d], shard.offsets[d] + shard.sizes[d]);
      }
      out.boxes.insert(out.boxes.end(), shard.offsets.begin(), shard.offsets.end());
      out.boxes.insert(out.boxes.end(), shard.sizes.begin(), shard.sizes.end());
      out.chunks.push_back({shard.file, shard.begin, shard.length});
    }
    CKPT_RETURN_IF_ERROR(ElementCount(tensor.shape));
    out.tensors.push_back(std::move(tensor));
    return {};
  }

  std::vector<std::pair<std::string, std::vector<Shard>>> tensors_;
  std::map<std::string, size_t> known_;
};

}  // namespace

Result<bool> IsShard(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const SafetensorsHeader header, HeaderOf(root, path));
  return header.metadata.contains(kShardingKey);
}

Result<DcpMetadata> ReadShards(const Root& root, const std::string& directory,
                               const std::vector<std::string>& files, bool whole) {
  ShardReader reader;
  for (uint32_t i = 0; i < files.size(); ++i) {
    const std::string path = JoinPath(directory, files[i]);
    auto header = HeaderOf(root, path);
    Status added = !header ? Fail(std::move(header).error())
                   : whole ? reader.AddWhole(i, *header)
                           : reader.Add(i, *header);
    if (!added) return Fail(std::move(added).error().WithContext(root.PathOf(path)));
  }
  auto out = reader.Finish(files);
  if (!out) return Fail(std::move(out).error().WithContext(root.PathOf(directory)));
  return out;
}

}  // namespace ckptfs::dcp
