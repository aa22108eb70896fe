// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/step_files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/base/strings.h"
#include "formats/rank_shards/device_mesh.h"

namespace ckptfs::rank_shards {
namespace {

constexpr std::string_view kConfig = "fsdp_config.json";
constexpr uint64_t kMaxConfig = 64 << 10;
constexpr uint64_t kMaxTracker = 64;

constexpr std::array<std::string_view, 3> kStarts = {"model_world_size_", "optim_world_size_",
                                                     "extra_state_world_size_"};
constexpr std::string_view kVerlTracker = "latest_checkpointed_iteration.txt";
constexpr std::string_view kSkyRlTracker = "latest_ckpt_global_step.txt";
constexpr std::string_view kRank = "_rank_";
constexpr std::string_view kEnd = ".pt";

std::optional<uint64_t> Number(std::string_view text) {
  uint64_t number = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool plain = text.size() == 1 || (!text.empty() && text.front() != '0');
  if (code != std::errc() || end != text.data() + text.size() || !plain) return std::nullopt;
  return number;
}

struct RankFile {
  FileKind kind;
  uint64_t world, rank;
};

std::optional<RankFile> ParseName(std::string_view name) {
  for (size_t kind = 0; kind < kStarts.size(); ++kind) {
    if (!name.starts_with(kStarts[kind]) || !name.ends_with(kEnd)) continue;
    name.remove_prefix(kStarts[kind].size());
    name.remove_suffix(kEnd.size());
    const size_t at = name.find(kRank);
    if (at == std::string_view::npos) return std::nullopt;
    const auto world = Number(name.substr(0, at));
    const auto rank = Number(name.substr(at + kRank.size()));
    if (!world || !rank || *rank >= *world || *world > kMaxRanks) return std::nullopt;
    return RankFile{static_cast<FileKind>(kind), *world, *rank};
  }
  return std::nullopt;
}

struct Config {
  std::optional<uint64_t> world;
  std::string tool;
  bool flat = false;
};

// One that is not JSON, or says no number, counts as none.
Result<Config> ReadConfig(const Root& root, const std::string& path) {
  Config out;
  CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(root, path));
  if (!there) return out;
  CKPT_ASSIGN_OR_RETURN(const std::string text, ReadWhole(root, path, kMaxConfig));
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) return out;
  const auto world = json.find("world_size");
  if (world != json.end() && world->is_number_unsigned()) out.world = world->get<uint64_t>();
  const auto version = json.find("FSDP_version");
  out.flat = version != json.end() && *version == 1;
  if (version != json.end()) out.tool = "verl";
  if (json.contains("fsdp_strategy")) out.tool = "SkyRL";
  return out;
}

Status Missing(const std::set<uint64_t>& ranks, FileKind kind, const StepFiles& files,
               std::string_view path) {
  uint64_t rank = 0;
  while (ranks.contains(rank)) ++rank;
  if (rank >= files.world) return {};
  return Refuse(path, ": no ", FileName(kind, files.world, rank), ", though there ",
                ranks.size() == 1 ? "is one" : "are those", " of ", Counted(ranks.size(), "rank"),
                " of ", files.world);
}

}  // namespace

std::string FileName(FileKind kind, uint64_t world, uint64_t rank) {
  return StrCat(kStarts[static_cast<size_t>(kind)], world, kRank, rank, kEnd);
}

bool HasFiles(const StepEntries& entries) {
  return std::ranges::any_of(entries.files, [](const std::string& name) {
    const auto file = ParseName(name);
    return file && file->kind == FileKind::kModel;
  });
}

Result<std::optional<StepFiles>> ListFiles(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(root, directory));
  std::map<uint64_t, StepFiles> worlds;
  for (const std::string& name : entries.files) {
    const auto file = ParseName(name);
    if (!file) continue;
    StepFiles& of = worlds[file->world];
    const std::array<std::set<uint64_t>*, 3> sets = {&of.model, &of.optimizer, &of.extra};
    sets[static_cast<size_t>(file->kind)]->insert(file->rank);
  }
  std::erase_if(worlds, [](const auto& one) { return one.second.model.empty(); });
  if (worlds.empty()) return std::optional<StepFiles>();
  CKPT_ASSIGN_OR_RETURN(const Config config, ReadConfig(root, JoinPath(directory, kConfig)));
  const auto chosen =
      config.world && worlds.contains(*config.world) ? worlds.find(*config.world) : worlds.begin();
  StepFiles out = chosen->second;
  out.world = chosen->first;
  out.configured = config.world;
  out.tool = config.tool;
  out.flat = config.flat;
  for (const auto& [world, files] : worlds) {
    if (world != out.world) out.other_worlds.insert(world);
  }
  return std::optional(std::move(out));
}

Status CheckWhole(const StepFiles& files, std::string_view path, bool weights_only) {
  if (files.configured && *files.configured != files.world) {
    return Refuse(path, ": ", kConfig, " says a world size of ", *files.configured,
                  ", but the files are of ", files.world);
  }
  if (!files.other_worlds.empty() && !files.configured) {
    return Refuse(path, ": it holds files of the world sizes ", files.world, " and ",
                  *files.other_worlds.begin(), ", and no ", kConfig, " says which are the step's");
  }
  CKPT_RETURN_IF_ERROR(Missing(files.model, FileKind::kModel, files, path));
  if (weights_only || files.optimizer.empty()) return {};
  Status optimizer = Missing(files.optimizer, FileKind::kOptimizer, files, path);
  if (optimizer) return {};
  Error error = std::move(optimizer).error();
  error.message += " (`adopt --weights-only` takes the weights)";
  return Fail(std::move(error));
}

Result<std::vector<std::string>> ModelFolders(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(root, directory));
  std::vector<std::string> out;
  for (const std::string& name : entries.directories) {
    const auto inside = ListStepEntries(root, JoinPath(directory, name));
    if (!inside && !IsOutOfReach(inside.error())) return Fail(Error(inside.error()));
    if (inside && HasFiles(*inside)) out.push_back(name);
  }
  const auto rank_of = [](const std::string& name) {
    return name == "actor" ? 0 : name == "policy" ? 1 : 2;
  };
  std::ranges::stable_sort(out, {}, rank_of);
  return out;
}

Result<std::optional<Tracker>> FindTracker(const Root& root, const std::string& run) {
  using Maybe = std::optional<Tracker>;
  constexpr std::array kTrackers = {std::pair(kVerlTracker, FormatOrder::kVerl),
                                    std::pair(kSkyRlTracker, FormatOrder::kSkyRl)};
  for (const auto& [name, format] : kTrackers) {
    const std::string path = JoinPath(run, name);
    CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(root, path));
    if (!there) continue;
    const auto text = ReadWhole(root, path, kMaxTracker);
    // One that is too long, or closed to us, names no step.
    const bool none =
        !text && (text.error().code == ErrorCode::kInvalid || IsOutOfReach(text.error()));
    if (none) return Maybe(Tracker{format, std::nullopt});
    if (!text) return Fail(Error(text.error()));
    std::string_view digits = *text;
    while (!digits.empty() && (digits.back() == '\n' || digits.back() == ' ')) {
      digits.remove_suffix(1);
    }
    return Maybe(Tracker{format, Number(digits)});
  }
  return Maybe();
}

}  // namespace ckptfs::rank_shards
