// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/names.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <span>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs::deepspeed {
namespace {

constexpr uint64_t kMaxPointer = 256;  // bytes that are looked at
constexpr uint32_t kMaxRank = 1u << 20;

// Reads "<literal><number><literal>..." from the front of `text`.
class Scanner {
 public:
  explicit Scanner(std::string_view text) : text_(text) {}

  bool Literal(std::string_view expected) {
    if (!text_.starts_with(expected)) return false;
    text_.remove_prefix(expected.size());
    return true;
  }
  bool Number(uint32_t& out) {
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), out);
    if (error != std::errc() || out >= kMaxRank) return false;
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return true;
  }
  bool Done() const { return text_.empty(); }

 private:
  std::string_view text_;
};

template <class Key>
Status Insert(std::map<Key, std::string>& into, const Key& key, std::string_view name) {
  const auto [at, added] = into.try_emplace(key, std::string(name));
  if (added) return {};
  return Fail(ErrorCode::kInvalid, StrCat(name, ": ", at->second,
                                          " belongs to the same rank; two runs (of two "
                                          "precisions?) lie in one directory"));
}

bool ScanModel(std::string_view name, uint32_t& mp) {
  Scanner scan(name);
  return scan.Literal("mp_rank_") && scan.Number(mp) && scan.Literal("_model_states.pt") &&
         scan.Done();
}

bool ScanZero(std::string_view name, std::string_view suffix, RankKey& key) {
  Scanner scan(name);
  if (!scan.Literal("bf16_")) (void)scan.Literal("fp16_");
  return scan.Literal("zero_pp_rank_") && scan.Number(key.dp) && scan.Literal("_mp_rank_") &&
         scan.Number(key.mp) && scan.Literal(suffix) && scan.Done();
}

bool ScanLayer(std::string_view name, LayerKey& key) {
  Scanner scan(name);
  if (!scan.Literal("layer_") || !scan.Number(key.layer)) return false;
  Scanner without_tp = scan;
  if (without_tp.Literal("-model_states.pt") && without_tp.Done()) return true;
  return scan.Literal("-model_") && scan.Number(key.tp) && scan.Literal("-model_states.pt") &&
         scan.Done();
}

bool ScanExpert(std::string_view name, ExpertKey& key) {
  Scanner scan(name);
  return scan.Literal("layer_") && scan.Number(key.layer) && scan.Literal("_expert_") &&
         scan.Number(key.expert) && scan.Literal("_mp_rank_") && scan.Number(key.mp) &&
         scan.Literal("_model_states.pt") && scan.Done();
}

bool ScanExpertOptimizer(std::string_view name, RankKey& key) {
  Scanner scan(name);
  return scan.Literal("expp_rank_") && scan.Number(key.dp) && scan.Literal("_mp_rank_") &&
         scan.Number(key.mp) && scan.Literal("_optim_states.pt") && scan.Done();
}

using RankFiles = std::map<RankKey, std::string>;

// True if there is one file of each rank, numbered as a degree does.
bool NumberedBySequence(const RankFiles& files, uint32_t degree) {
  std::set<uint32_t> ranks;
  for (const auto& [key, name] : files) {
    if (key.mp != key.dp % degree || !ranks.insert(key.dp).second) return false;
  }
  return true;
}

RankFiles OfModelRankZero(RankFiles files) {
  RankFiles out;
  for (auto& [key, name] : files) out.emplace(RankKey{0, key.dp}, std::move(name));
  return out;
}

}  // namespace

uint32_t StepFiles::SequenceDegree() const {
  const uint32_t degree = ModelRanks();
  const bool model_of_zero = model.empty() || model.rbegin()->first == 0;
  const bool by_sequence = degree > 1 && model_of_zero && layers.empty() && experts.empty() &&
                           NumberedBySequence(optimizer, degree) &&
                           NumberedBySequence(stage3_model, degree);
  return by_sequence ? degree : 1;
}

void StepFiles::DropSequenceRanks() {
  optimizer = OfModelRankZero(std::move(optimizer));
  stage3_model = OfModelRankZero(std::move(stage3_model));
}

uint32_t StepFiles::DataRanks() const {
  uint32_t ranks = 1;
  for (const auto* files : {&stage3_model, &optimizer}) {
    for (const auto& [key, name] : *files) ranks = std::max(ranks, key.dp + 1);
  }
  return ranks;
}

uint32_t StepFiles::ModelRanks() const {
  uint32_t ranks = model.empty() ? 1 : model.rbegin()->first + 1;
  for (const auto* files : {&stage3_model, &optimizer}) {
    if (!files->empty()) ranks = std::max(ranks, files->rbegin()->first.mp + 1);
  }
  return ranks;
}

Status ClassifyFile(std::string_view name, StepFiles& files) {
  uint32_t mp = 0;
  RankKey rank;
  LayerKey layer;
  ExpertKey expert;
  if (ScanModel(name, mp)) return Insert(files.model, mp, name);
  if (ScanZero(name, "_model_states.pt", rank)) return Insert(files.stage3_model, rank, name);
  if (ScanZero(name, "_optim_states.pt", rank)) return Insert(files.optimizer, rank, name);
  if (ScanLayer(name, layer)) return Insert(files.layers, layer, name);
  if (ScanExpert(name, expert)) return Insert(files.experts, expert, name);
  if (ScanExpertOptimizer(name, rank)) return Insert(files.expert_optimizer, rank, name);
  return {};
}

Result<StepFiles> ListStep(const Root& root, const std::string& directory) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  StepFiles files;
  for (const auto& [name, kind, link] : entries) {
    if (kind == EntryKind::kDirectory && name == "offloaded_tensors") files.offloaded = true;
    // A file of ours that a link was to lead to is missed, not passed over.
    if (kind == EntryKind::kOther && !link.empty() && name.ends_with(".pt")) {
      CKPT_RETURN_IF_ERROR(root.Stat(JoinPath(directory, name)));
    }
    if (kind != EntryKind::kFile) continue;
    if (Status added = ClassifyFile(name, files); !added) {
      return Fail(std::move(added).error().WithContext(root.PathOf(directory)));
    }
  }
  return files;
}

uint64_t IterationOfTag(std::string_view tag) {
  const size_t last = tag.find_last_of("0123456789");
  if (last == std::string_view::npos) return 0;
  const size_t before = tag.substr(0, last + 1).find_last_not_of("0123456789");
  const size_t first = before == std::string_view::npos ? 0 : before + 1;
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(tag.data() + first, tag.data() + last + 1, number);
  return error == std::errc() ? number : 0;
}

bool IsTagName(std::string_view tag) {
  if (tag.empty() || tag.size() >= 255) return false;
  if (tag.find_first_of(std::string_view("\0\n", 2)) != std::string_view::npos) return false;
  for (size_t at = 0; at <= tag.size();) {
    const size_t end = std::min(tag.find('/', at), tag.size());
    const std::string_view component = tag.substr(at, end - at);
    if (component.empty() || component == "." || component == "..") return false;
    at = end + 1;
  }
  return true;
}

Result<std::optional<std::string>> ReadPointer(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const bool there, HasFile(root, path));
  if (!there) return std::optional<std::string>();
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  std::string text(std::min<uint64_t>(file->size(), kMaxPointer), '\0');
  CKPT_RETURN_IF_ERROR(file->ReadAt(0, std::as_writable_bytes(std::span(text))));
  const size_t first = text.find_first_not_of(" \t\r\n");
  const size_t last = text.find_last_not_of(" \t\r\n");
  text = first == std::string::npos ? "" : text.substr(first, last - first + 1);
  if (!IsTagName(text)) {
    return Fail(
        ErrorCode::kInvalid,
        StrCat(root.PathOf(path), ": does not hold the name of a directory below this one"));
  }
  return std::optional<std::string>(std::move(text));
}

}  // namespace ckptfs::deepspeed
