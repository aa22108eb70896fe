// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/file_pieces.h"

#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/strings.h"
#include "core/io/root.h"
#include "core/model/left_out.h"
#include "formats/huggingface/names.h"
#include "formats/huggingface/shard_index.h"
#include "formats/tools/step_names.h"

namespace ckptfs::huggingface {
namespace {

constexpr std::string_view kEngines = "model_states.pt";
constexpr std::string_view kMegatron = "model_optim_rng.pt";
constexpr std::string_view kMegatronRank = "mp_rank_";
constexpr std::string_view kMeta = "consolidated.";

bool IsIndexName(std::string_view name) {
  return name.ends_with(".json") && name.find(".index.") != std::string_view::npos;
}

// "a_#_b" of "a_12_b".
std::string WithoutNumbers(std::string_view name) {
  std::string out;
  for (const char c : name) {
    if (!IsDigit(c)) {
      out += c;
    } else if (out.empty() || out.back() != '#') {
      out += '#';
    }
  }
  return out;
}

// The names that differ from `own` in numbers alone.
std::vector<std::string> Siblings(const std::vector<RootEntry>& entries, EntryKind kind,
                                  std::string_view own) {
  const std::string form = WithoutNumbers(own);
  std::vector<std::string> out;
  for (const RootEntry& entry : entries) {
    const bool other = entry.kind == kind && entry.name != own;
    if (other && WithoutNumbers(entry.name) == form) out.push_back(entry.name);
  }
  return out;
}

// Where a number begins behind the word of a rank, and what follows the number.
struct RankPlace {
  std::string_view before, after;
};

std::vector<RankPlace> RanksIn(std::string_view name) {
  std::vector<RankPlace> out;
  for (size_t at = 0; at < name.size(); ++at) {
    if (!IsDigit(name[at]) || (at > 0 && IsDigit(name[at - 1]))) continue;
    if (!EndsInRank(name.substr(0, at))) continue;
    const size_t end = std::min(name.find_first_not_of("0123456789", at), name.size());
    out.push_back({name.substr(0, at), name.substr(end)});
  }
  return out;
}

// True if the names differ in the number at the place alone.
bool DiffersAt(const RankPlace& place, std::string_view other) {
  if (other.size() <= place.before.size() + place.after.size()) return false;
  if (!other.starts_with(place.before) || !other.ends_with(place.after)) return false;
  other.remove_prefix(place.before.size());
  other.remove_suffix(place.after.size());
  return std::ranges::all_of(other, IsDigit);
}

tl::unexpected<Error> RefusePart(const StepCandidate& candidate, size_t parts, std::string_view of,
                                 std::string remedy) {
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat(candidate.Path(), ": is one of ", parts, " files of ", of)}
                  .Needing(std::move(remedy)));
}

Status CheckNoEngines(const StepCandidate& candidate, const std::vector<RootEntry>& entries,
                      const std::string& own) {
  const size_t parts = Siblings(entries, EntryKind::kFile, own).size() + 1;
  if (own.ends_with(kEngines) && parts > 1) {
    return RefusePart(candidate, parts, "DeepSpeed's ranks or layers",
                      StrCat("adopt the directory ", candidate.SavePath()));
  }
  if (own.starts_with(kMeta) && own.ends_with(".pth") && parts > 1) {
    return RefusePart(candidate, parts, "Meta's model-parallel ranks",
                      "convert them to Hugging Face's files (transformers' "
                      "convert_llama_weights_to_hf.py)");
  }
  const std::string rank = LastComponent(candidate.save);
  if (own != kMegatron || !rank.starts_with(kMegatronRank)) return {};
  const auto ranks = candidate.root->List(ParentPath(candidate.save));
  const size_t others = ranks ? Siblings(*ranks, EntryKind::kDirectory, rank).size() : 0;
  if (others == 0) return {};
  return RefusePart(candidate, others + 1, "Megatron's ranks",
                    "adopt the directory that holds the mp_rank_NN");
}

}  // namespace

Status CheckNoPiece(const StepCandidate& candidate) {
  const Root& root = *candidate.root;
  CKPT_ASSIGN_OR_RETURN(const bool file, HasFile(root, candidate.directory));
  if (!file) return {};
  const auto entries = root.List(candidate.save);
  if (!entries) return {};
  const std::string own = LastComponent(candidate.directory);
  // One that an index names is found in its text before that is parsed: there may be hundreds of
  // files beside an index of many megabytes.
  const bool plain = std::ranges::all_of(
      own, [](char c) { return c > ' ' && c < 127 && c != '"' && c != '\\' && c != '/'; });
  for (const RootEntry& entry : *entries) {
    if (entry.kind != EntryKind::kFile || !IsIndexName(entry.name)) continue;
    const auto text = ReadWhole(root, JoinPath(candidate.save, entry.name), kMaxIndexBytes);
    if (!text || (plain && text->find(own) == std::string::npos)) continue;
    const auto index = ParseShardIndex(*text);
    if (!index) continue;
    std::set<std::string_view> shards;
    for (const auto& [tensor, shard] : *index) shards.insert(shard);
    if (shards.size() < 2 || !shards.contains(own)) continue;
    return Fail(Error{ErrorCode::kUnsupported, StrCat(candidate.Path(), ": is one of ",
                                                      shards.size(), " shards of ", entry.name)}
                    .Needing(StrCat("adopt the directory ", candidate.SavePath())));
  }
  const auto number = ShardNumberOf(own);
  if (!number) return CheckNoEngines(candidate, *entries, own);
  return Fail(Error{ErrorCode::kUnsupported,
                    StrCat(candidate.Path(), ": is shard ", number->shard, " of ", number->shards,
                           " by its name, but an index that names the others is missing")}
                  .Needing("put the model's index (*.index.json) and all shards there, and adopt "
                           "the directory; or "
                           "rename the file to take it alone"));
}

Status LeaveOutRanks(const StepCandidate& candidate, StepModel& header) {
  CKPT_ASSIGN_OR_RETURN(const bool file, HasFile(*candidate.root, candidate.directory));
  const auto entries = file ? candidate.root->List(candidate.save) : std::vector<RootEntry>();
  if (!file || !entries) return {};
  const std::string own = LastComponent(candidate.directory);
  const std::vector<RankPlace> places = RanksIn(own);
  std::set<std::string> others;
  for (const std::string& other : Siblings(*entries, EntryKind::kFile, own)) {
    const bool rank = std::ranges::any_of(
        places, [&](const RankPlace& place) { return DiffersAt(place, other); });
    if (rank) others.insert(other);
  }
  if (others.empty()) return {};
  const std::string more = others.size() > 1 ? StrCat(" and ", others.size() - 1, " more") : "";
  LeaveOut(header, {LeftOutPart::kModel, StrCat("'", *others.begin(), "'", more),
                    "the name differs in the number of a rank alone: where each rank has a part "
                    "of the model, this step is one part",
                    ""});
  return {};
}

}  // namespace ckptfs::huggingface
