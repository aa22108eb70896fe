// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/step_files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "core/base/device_error.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/state/model_choice.h"
#include "formats/dcp/safetensors_shards.h"
#include "formats/huggingface/shard_index.h"

namespace ckptfs::dcp {
namespace {

constexpr std::string_view kUnfinished = ".metadata.tmp";
constexpr std::string_view kDataEnding = ".distcp";
// Folders of one step by names that others may give to something else: all of a row are there.
constexpr std::string_view kOptimizerFolder = "optim";
const std::array<std::vector<std::string>, 2> kRows = {
    std::vector<std::string>{"model_and_optim"},
    std::vector<std::string>{"model", std::string(kOptimizerFolder)}};

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

namespace {

// The number of the model of "pytorch_model_fsdp_1", and of "optimizer_1", which trains that.
std::optional<uint64_t> ModelNumber(std::string_view name) {
  for (const std::string_view prefix : {"pytorch_model_fsdp_", "optimizer_"}) {
    if (name.starts_with(prefix)) return Digits(name.substr(prefix.size()));
  }
  return std::nullopt;
}

}  // namespace

bool IsPartName(std::string_view name) { return ModelNumber(name).has_value(); }

bool IsOptimizerPart(std::string_view name) {
  return IsOptimizerWord(name) && name != "opt" && !name.starts_with("model");
}

namespace {

Result<PartFiles> PartOf(const Root& root, const std::string& directory,
                         const std::vector<RootEntry>& entries) {
  PartFiles out;
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
  // A file that is broken, or goes away, is reported by the source that reads it otherwise.
  const auto sharded = IsShard(root, JoinPath(directory, safetensors.front()));
  if (!sharded && IsOfDevice(sharded.error())) return Fail(Error(sharded.error()));
  if (sharded && *sharded) out.shards = std::move(safetensors);
  return out;
}

}  // namespace

Result<PartFiles> ListPart(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return PartFiles();
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  return PartOf(root, directory, entries);
}

namespace {

constexpr std::string_view kWholeFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

bool IsThere(const std::vector<RootEntry>& entries, std::string_view name, EntryKind kind) {
  return std::ranges::any_of(
      entries, [&](const RootEntry& one) { return one.name == name && one.kind == kind; });
}

// Weights as safetensors in the directory of an optimizer's DCP files, or in the one above; an
// empty part if there are none.
Result<PartFiles> WeightsBeside(const Root& root, const std::string& directory,
                                const std::vector<RootEntry>& entries) {
  PartFiles out;
  out.beside = true;
  std::vector<std::string> all;
  for (const RootEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile && entry.name.ends_with(".safetensors"))
      all.push_back(entry.name);
  }
  if (all.empty()) return out;
  const auto sharded = IsShard(root, JoinPath(directory, all.front()));
  if (!sharded && IsOfDevice(sharded.error())) return Fail(Error(sharded.error()));
  if (sharded && *sharded) {
    out.shards = std::move(all);
    return out;
  }
  out.whole = true;
  if (IsThere(entries, kWholeFile, EntryKind::kFile)) {
    out.shards.emplace_back(kWholeFile);
  } else if (IsThere(entries, kIndexFile, EntryKind::kFile)) {
    CKPT_ASSIGN_OR_RETURN(
        auto map, huggingface::ReadShardIndex(root, JoinPath(directory, std::string(kIndexFile))));
    std::set<std::string> files;
    for (auto& [tensor, file] : map) files.insert(std::move(file));
    out.shards.assign(files.begin(), files.end());
  }
  return out;
}

// The folders that count by their names and by what is in them.
template <class IsNamed, class IsPart>
Result<std::vector<PartFiles>> FoldersOf(const Root& root, const std::string& directory,
                                         const std::vector<RootEntry>& entries,
                                         const IsNamed& is_named, const IsPart& is_part) {
  std::vector<PartFiles> out;
  for (const RootEntry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory || !is_named(entry.name)) continue;
    CKPT_ASSIGN_OR_RETURN(PartFiles part, ListPart(root, JoinPath(directory, entry.name)));
    if (!is_part(part)) continue;
    part.directory = entry.name;
    out.push_back(std::move(part));
  }
  return out;
}

// DCP directories below one with weights whose names are words for an optimizer.
Result<std::vector<PartFiles>> OptimizersBelow(const Root& root, const std::string& directory,
                                               const std::vector<RootEntry>& entries) {
  return FoldersOf(
      root, directory, entries, [](const std::string& name) { return IsOptimizerPart(name); },
      [](const PartFiles& part) { return part.metadata || part.data; });
}

Result<std::vector<PartFiles>> NumberedFolders(const Root& root, const std::string& directory,
                                               const std::vector<RootEntry>& entries) {
  return FoldersOf(
      root, directory, entries, [](const std::string& name) { return IsPartName(name); },
      [](const PartFiles& part) { return part.Any(); });
}

// True for a folder of another model than the first: accelerate numbers models as it prepared them,
// and an optimizer as the model that it trains.
bool IsOfAnotherModel(const std::vector<PartFiles>& folders, const PartFiles& folder) {
  return std::ranges::any_of(folders, [&](const PartFiles& one) {
    return *ModelNumber(one.directory) < *ModelNumber(folder.directory);
  });
}

// Folders that a tool names, or all of a row.
Result<std::vector<PartFiles>> ListFolders(const Root& root, const std::string& directory,
                                           const std::vector<RootEntry>& entries) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<PartFiles> numbered,
                        NumberedFolders(root, directory, entries));
  std::vector<PartFiles> out;
  std::ranges::copy_if(numbered, std::back_inserter(out),
                       [&](const PartFiles& one) { return !IsOfAnotherModel(numbered, one); });
  const auto there = [&](const std::string& name) {
    return IsThere(entries, name, EntryKind::kDirectory);
  };
  for (size_t row = 0; row < kRows.size() && out.empty(); ++row) {
    if (!std::ranges::all_of(kRows[row], there)) continue;
    for (const std::string& name : kRows[row]) {
      CKPT_ASSIGN_OR_RETURN(PartFiles part, ListPart(root, JoinPath(directory, name)));
      if (!part.Any()) break;
      part.directory = name;
      out.push_back(std::move(part));
    }
    if (out.size() < kRows[row].size()) out.clear();
  }
  return out;
}

}  // namespace

Result<std::vector<std::string>> FoldersOfOtherModels(const Root& root,
                                                      const std::string& directory) {
  std::vector<std::string> out;
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return out;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  CKPT_ASSIGN_OR_RETURN(const auto numbered, NumberedFolders(root, directory, entries));
  for (const PartFiles& folder : numbered) {
    if (IsOfAnotherModel(numbered, folder)) out.push_back(folder.directory);
  }
  return out;
}

Result<std::vector<PartFiles>> ListParts(const Root& root, const std::string& directory) {
  std::vector<PartFiles> out;
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, directory));
  if (!there) return out;
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  CKPT_ASSIGN_OR_RETURN(PartFiles own, PartOf(root, directory, entries));
  const bool any = own.Any();
  if (any) out.push_back(std::move(own));
  if (any && !out[0].metadata && out[0].shards.empty()) return out;
  if (!any) {
    CKPT_ASSIGN_OR_RETURN(out, ListFolders(root, directory, entries));
  }
  const bool folders = !any && !out.empty();
  if (folders && !std::ranges::all_of(
                     out, [](const PartFiles& one) { return IsOptimizerPart(one.directory); })) {
    return out;
  }
  const bool weights = any && !out[0].shards.empty();
  if (weights || out.empty()) {
    CKPT_ASSIGN_OR_RETURN(std::vector<PartFiles> below, OptimizersBelow(root, directory, entries));
    std::ranges::move(below, std::back_inserter(out));
  }
  if (weights || out.empty()) return out;
  CKPT_ASSIGN_OR_RETURN(PartFiles beside, WeightsBeside(root, directory, entries));
  const bool found = !beside.shards.empty();
  if (found) out.push_back(std::move(beside));
  // An optimizer's directory below one without weights is somebody's own step.
  return found || any || folders ? out : std::vector<PartFiles>();
}

}  // namespace ckptfs::dcp
