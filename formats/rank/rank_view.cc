// SPDX-License-Identifier: Apache-2.0

#include "formats/rank/rank_view.h"

#include <array>
#include <charconv>
#include <map>
#include <optional>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/view/shard.h"
#include "formats/rank/rank_tensors.h"
#include "formats/rank/rank_text.h"
#include "formats/torch/archive_builder.h"

namespace ckptfs {
namespace {

enum FileKind : size_t { kModelSafe, kModelTorch, kOptimizerSafe, kOptimizerTorch, kInfo };
constexpr size_t kFiles = 5;
constexpr std::array<std::string_view, kFiles> kFileNames = {
    "model.safetensors", "model.pt", "optimizer.safetensors", "optimizer.pt", "info.json"};
constexpr std::array<Reading, kFiles> kReadings = {
    Reading::kMapped, Reading::kCopied, Reading::kMapped, Reading::kCopied, Reading::kRandom};

std::string RankName(uint64_t rank) { return StrCat("rank", rank); }

// "rank12" in its one spelling, below the world's size.
std::optional<uint64_t> ParseRank(std::string_view name, uint64_t world) {
  constexpr std::string_view kPrefix = "rank";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  uint64_t rank = 0;
  const char* begin = name.data() + kPrefix.size();
  const auto parsed = std::from_chars(begin, name.data() + name.size(), rank);
  if (parsed.ec != std::errc() || rank >= world || name != RankName(rank)) return std::nullopt;
  return rank;
}

std::optional<FileKind> ParseFile(std::string_view name) {
  for (size_t i = 0; i < kFileNames.size(); ++i) {
    if (kFileNames[i] == name) return static_cast<FileKind>(i);
  }
  return std::nullopt;
}

const std::vector<RankTensor>& TensorsOf(const RankTensors& all, FileKind kind) {
  return kind == kModelSafe || kind == kModelTorch ? all.model : all.optimizer;
}

std::vector<SafetensorsEntry> Entries(const std::vector<RankTensor>& tensors) {
  std::vector<SafetensorsEntry> entries;
  entries.reserve(tensors.size());
  for (const RankTensor& tensor : tensors) {
    entries.push_back({tensor.key, tensor.dtype, tensor.shape, 0, 0});
  }
  return entries;
}

// With the parts, unless the header would pass the format's limit: then they are
// in info.json only.
std::map<std::string, std::string> FittingMetadata(const StepModel& step, const RankTensors& all,
                                                   FileKind kind, const RankCoordinate& rank) {
  const auto& tensors = TensorsOf(all, kind);
  auto metadata = RankMetadata(step, tensors, all, rank);
  const auto size = SafetensorsHeaderSize(metadata, Entries(tensors));
  if (!size || *size > kSafetensorsMaxHeader) metadata.erase("ckptfs.parts");
  return metadata;
}

Result<uint64_t> SafetensorsSize(const StepModel& step, const RankTensors& all, FileKind kind,
                                 const RankCoordinate& rank) {
  const auto& tensors = TensorsOf(all, kind);
  CKPT_ASSIGN_OR_RETURN(uint64_t size, SafetensorsHeaderSize(FittingMetadata(step, all, kind, rank),
                                                             Entries(tensors)));
  for (const RankTensor& tensor : tensors) size += tensor.ByteLength();
  return size;
}

Result<Plan> SafetensorsPlan(const StepModel& step, const RankTensors& all, FileKind kind,
                             const RankCoordinate& rank) {
  const auto& tensors = TensorsOf(all, kind);
  std::vector<SafetensorsEntry> entries = Entries(tensors);
  CKPT_ASSIGN_OR_RETURN(std::string header,
                        RenderSafetensorsHeader(FittingMetadata(step, all, kind, rank), entries));
  PlanBuilder plan;
  plan.Literal(std::move(header));
  for (const RankTensor& tensor : tensors) {
    plan.Append(tensor.ByteLength(), tensor.SegmentOf(rank));
  }
  return std::move(plan).Finish();
}

// A flat dict of the same keys; an alias is the very tensor it names.
Result<ArchiveContent> TorchContent(const RankTensors& all, FileKind kind,
                                    const RankCoordinate& rank) {
  ArchiveBuilder archive;
  std::vector<std::pair<NodeId, NodeId>> items;
  std::map<std::string_view, NodeId> shown;
  for (const RankTensor& tensor : TensorsOf(all, kind)) {
    const NodeId key = archive.pickle().String(tensor.key);
    CKPT_ASSIGN_OR_RETURN(const NodeId value,
                          archive.Tensor(tensor.dtype, tensor.shape,
                                         {{tensor.ByteLength(), tensor.SegmentOf(rank)}}));
    items.emplace_back(key, value);
    shown.emplace(tensor.key, value);
  }
  if (kind == kModelTorch) {
    for (const auto& [alias, key] : all.aliases) {
      items.emplace_back(archive.pickle().String(alias), shown.at(key));
    }
  }
  const NodeId root = archive.pickle().Dict(items);
  return std::move(archive).Finish(root);
}

std::string_view FolderOf(FileKind kind) { return kind == kModelTorch ? "model" : "optimizer"; }

ViewEntry FileEntry(size_t file, uint64_t size) {
  return ViewEntry::File(kFileNames[file], size, kReadings[file]);
}

class RankView : public View {
 public:
  explicit RankView(std::shared_ptr<const ShownState> shown)
      : View(shown->shared_step()),
        shown_(std::move(shown)),
        step_(shown_->step()),
        layout_(shown_->layout()) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  std::vector<std::string> LeftOut() const override;
  uint64_t MemoryBytes() const override;

 private:
  // File sizes of the ranks at one place of the model-parallel grid.
  using Sizes = std::array<uint64_t, kFiles>;
  using Place = std::array<uint32_t, 4>;  // tp, pp, ep, etp

  Result<RankTensors> TensorsAt(const RankCoordinate& at) const {
    return BuildRankTensors(*shown_, at);
  }
  Result<Sizes> SizesOf(uint64_t rank) const;

  const std::shared_ptr<const ShownState> shown_;
  const StepModel& step_;
  const Layout& layout_;
  mutable Mutex mutex_;
  mutable std::map<Place, Sizes> sizes_ GUARDED_BY(mutex_);
};

// True if some rank's info.json may name it in left_out.
bool MayBeLeftOut(const Atom& atom) {
  return atom.relation == Relation::kReduced || atom.relation == Relation::kOpaque ||
         ByteWidth(atom.dtype) == 0 || TorchName(atom.dtype).empty();
}

// Returns what the first rank of each stage leaves out; the stage's others leave out the same.
std::vector<std::string> RankView::LeftOut() const {
  if (std::ranges::none_of(step_.atoms, MayBeLeftOut)) return {};
  std::map<std::string, std::pair<std::string, size_t>> by_reason;
  for (uint32_t stage = 0; stage < layout_.pp; ++stage) {
    RankCoordinate at;
    at.pp = stage;
    const auto tensors = TensorsAt(at);
    if (!tensors) continue;  // a file of it says why
    for (const std::string& line : tensors->left_out) {
      const size_t colon = line.rfind(": ");
      const auto [reason, added] =
          by_reason.try_emplace(line.substr(colon + 2), line.substr(0, colon), 0);
      ++reason->second.second;
    }
  }
  std::vector<std::string> lines;
  for (const auto& [reason, what] : by_reason) {
    const std::string more = what.second > 1 ? StrCat(" and ", what.second - 1, " more") : "";
    lines.push_back(StrCat("'", what.first, "'", more, ": ", reason));
  }
  return lines;
}

uint64_t RankView::MemoryBytes() const {
  constexpr uint64_t kNode = sizeof(std::pair<const Place, Sizes>) + 4 * sizeof(void*);
  const uint64_t places =
      std::min(layout_.World(), uint64_t{layout_.tp} * layout_.pp * layout_.ep * layout_.etp);
  return sizeof(*this) + places * kNode;
}

Result<RankView::Sizes> RankView::SizesOf(uint64_t rank) const {
  const RankCoordinate at = CoordinateOf(layout_, rank);
  const Place place{at.tp, at.pp, at.ep, at.etp};
  {
    MutexLock lock(mutex_);
    auto found = sizes_.find(place);
    if (found != sizes_.end()) return found->second;
  }
  CKPT_ASSIGN_OR_RETURN(const RankTensors all, TensorsAt(at));
  Sizes sizes{};
  for (FileKind kind : {kModelSafe, kOptimizerSafe}) {
    CKPT_ASSIGN_OR_RETURN(sizes[kind], SafetensorsSize(step_, all, kind, at));
  }
  for (FileKind kind : {kModelTorch, kOptimizerTorch}) {
    CKPT_ASSIGN_OR_RETURN(const ArchiveContent content, TorchContent(all, kind, at));
    CKPT_ASSIGN_OR_RETURN(sizes[kind], content.Size(FolderOf(kind)));
  }
  sizes[kInfo] = RankInfo(*shown_, rank, all).size();
  MutexLock lock(mutex_);
  return sizes_.emplace(place, sizes).first->second;
}

Result<std::vector<ViewEntry>> RankView::List(std::string_view directory) const {
  std::vector<ViewEntry> entries;
  if (directory.empty()) {
    for (uint64_t rank = 0; rank < layout_.World(); ++rank) {
      entries.push_back(ViewEntry::Folder(RankName(rank)));
    }
    return entries;
  }
  const auto rank = ParseRank(directory, layout_.World());
  if (!rank) return NotInView(directory);
  CKPT_ASSIGN_OR_RETURN(const Sizes sizes, SizesOf(*rank));
  for (size_t i = 0; i < kFiles; ++i) entries.push_back(FileEntry(i, sizes[i]));
  return entries;
}

Result<ViewEntry> RankView::Find(std::string_view path) const {
  const std::string_view directory = path.substr(0, path.find('/'));
  const auto rank = ParseRank(directory, layout_.World());
  if (!rank) return NotInView(path);
  if (directory == path) return ViewEntry::Folder(directory);
  const auto file = ParseFile(path.substr(directory.size() + 1));
  if (!file) return NotInView(path);
  CKPT_ASSIGN_OR_RETURN(const Sizes sizes, SizesOf(*rank));
  return FileEntry(*file, sizes[*file]);
}

Result<Plan> RankView::MakePlan(std::string_view file) const {
  const std::string_view directory = file.substr(0, file.find('/'));
  const auto rank = ParseRank(directory, layout_.World());
  if (!rank || directory == file) return NotInView(file);
  const auto kind = ParseFile(file.substr(directory.size() + 1));
  if (!kind) return NotInView(file);
  const RankCoordinate at = CoordinateOf(layout_, *rank);
  CKPT_ASSIGN_OR_RETURN(const RankTensors all, TensorsAt(at));
  if (*kind == kInfo) {
    PlanBuilder plan;
    plan.Literal(RankInfo(*shown_, *rank, all));
    return std::move(plan).Finish();
  }
  if (*kind == kModelSafe || *kind == kOptimizerSafe) {
    return SafetensorsPlan(step_, all, *kind, at);
  }
  CKPT_ASSIGN_OR_RETURN(ArchiveContent content, TorchContent(all, *kind, at));
  return std::move(content).MakePlan(FolderOf(*kind));
}

}  // namespace

Result<std::shared_ptr<const View>> RankFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  CKPT_RETURN_IF_ERROR(CheckLayout(shown->step(), shown->layout()));
  CKPT_RETURN_IF_ERROR(shown->CheckNames());
  return std::make_shared<const RankView>(std::move(shown));
}

}  // namespace ckptfs
