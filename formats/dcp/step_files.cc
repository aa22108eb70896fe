// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/step_files.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>

#include "core/blob/safetensors_header.h"
#include "core/base/strings.h"
#include "formats/dcp/safetensors_shards.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kUnfinished = ".metadata.tmp";
constexpr std::string_view kDataEnding = ".distcp";

std::optional<uint64_t> Digits(std::string_view text) {
  uint64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool all = code == std::errc() && end == text.data() + text.size() && !text.empty();
  return all ? std::optional(number) : std::nullopt;
}

// The rank of "__3.metadata".
std::optional<uint64_t> MetadataRank(std::string_view name) {
  if (!name.starts_with("__") || !name.ends_with(kMetadataFile)) return std::nullopt;
  return Digits(name.substr(2, name.size() - 2 - kMetadataFile.size()));
}

}  // namespace

bool IsFileName(std::string_view name) {
  return name == kMetadataFile || name == kUnfinished || name.ends_with(kDataEnding) ||
         MetadataRank(name);
}

bool IsPartName(std::string_view name) {
  for (const std::string_view prefix : {"pytorch_model_fsdp_", "optimizer_"}) {
    if (name.starts_with(prefix) && Digits(name.substr(prefix.size()))) return true;
  }
  return false;
}

Result<PartFiles> ListPart(const Root& root, const std::string& directory) {
  PartFiles out;
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return out;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  std::map<uint64_t, std::string> ranks;
  std::vector<std::string> safetensors;
  int megatron = 0;
  for (const RootEntry& entry : entries) {
    if (entry.kind != EntryKind::kFile) continue;
    megatron += entry.name == "common.pt" || entry.name == "metadata.json";
    if (entry.name == kMetadataFile) out.metadata = true;
    if (const auto rank = MetadataRank(entry.name)) ranks.emplace(*rank, entry.name);
    if (entry.name.ends_with(kDataEnding) || entry.name == kUnfinished) out.data = true;
    if (entry.name.ends_with(".safetensors")) safetensors.push_back(entry.name);
  }
  if (megatron == 2) return PartFiles();
  for (auto& [rank, name] : ranks) out.ranks.push_back(std::move(name));
  if (out.Any() || safetensors.empty()) return out;
  // What is broken, or goes away, is for whoever reads such files otherwise to tell.
  const auto sharded = IsShard(root, JoinPath(directory, safetensors.front()));
  if (!sharded && sharded.error().code == ErrorCode::kIo) return Fail(Error(sharded.error()));
  if (sharded && *sharded) out.shards = std::move(safetensors);
  return out;
}

Result<std::vector<PartFiles>> ListParts(const Root& root, const std::string& directory) {
  std::vector<PartFiles> out;
  CKPT_ASSIGN_OR_RETURN(PartFiles own, ListPart(root, directory));
  if (own.Any()) {
    out.push_back(std::move(own));
    return out;
  }
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return out;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  for (const RootEntry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory || !IsPartName(entry.name)) continue;
    CKPT_ASSIGN_OR_RETURN(PartFiles part, ListPart(root, JoinPath(directory, entry.name)));
    if (!part.Any()) continue;
    part.directory = entry.name;
    out.push_back(std::move(part));
  }
  return out;
}

}  // namespace ckptfs::dcp
