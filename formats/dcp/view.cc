// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/view.h"

#include <charconv>
#include <optional>
#include <utility>

#include "core/base/strings.h"
#include "core/view/shard.h"
#include "formats/dcp/entries.h"
#include "formats/dcp/metadata_writer.h"

namespace ckptfs {
namespace {

constexpr std::string_view kTop = "dcp";
constexpr std::string_view kMetadataFile = ".metadata";

class DcpView : public View {
 public:
  DcpView(std::shared_ptr<const ShownState> shown, std::string top, dcp::DirectoryIndex index)
      : View(shown->shared_step()),
        shown_(std::move(shown)),
        top_(std::move(top)),
        index_(std::make_shared<const dcp::DirectoryIndex>(std::move(index))),
        metadata_size_(dcp::MetadataSize(*index_)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  uint64_t MemoryBytes() const override { return sizeof(*this) + index_->MemoryBytes(); }

 private:
  ViewEntry Metadata() const {
    return ViewEntry::File(kMetadataFile, metadata_size_, Reading::kRandom);
  }
  ViewEntry DataFile(uint64_t rank) const {
    return ViewEntry::File(dcp::DataFileName(rank), index_->FileSize(rank), Reading::kOnce);
  }
  // The path behind "<top>/"; "" for any other path.
  std::string_view BelowTop(std::string_view path) const;
  // The rank of a data file that there is, by its path in its one spelling.
  std::optional<uint64_t> RankOf(std::string_view path) const;

  const std::shared_ptr<const ShownState> shown_;
  const std::string top_;
  const std::shared_ptr<const dcp::DirectoryIndex> index_;
  const uint64_t metadata_size_;
};

std::string_view DcpView::BelowTop(std::string_view path) const {
  const bool below =
      path.starts_with(top_) && path.size() > top_.size() && path[top_.size()] == '/';
  return below ? path.substr(top_.size() + 1) : std::string_view();
}

std::optional<uint64_t> DcpView::RankOf(std::string_view path) const {
  constexpr std::string_view kPrefix = "__";
  const std::string_view name = BelowTop(path);
  if (!name.starts_with(kPrefix)) return std::nullopt;
  uint64_t rank = 0;
  const auto parsed =
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), rank);
  if (parsed.ec != std::errc() || rank >= index_->ranks()) return std::nullopt;
  const bool there = name == dcp::DataFileName(rank) && index_->FileSize(rank) > 0;
  return there ? std::optional(rank) : std::nullopt;
}

Result<std::vector<ViewEntry>> DcpView::List(std::string_view directory) const {
  if (directory.empty()) return std::vector<ViewEntry>{ViewEntry::Folder(top_)};
  if (directory != top_) return NotInView(directory);
  std::vector<ViewEntry> entries = {Metadata()};
  for (uint64_t rank = 0; rank < index_->ranks(); ++rank) {
    if (index_->FileSize(rank) > 0) entries.push_back(DataFile(rank));
  }
  return entries;
}

Result<ViewEntry> DcpView::Find(std::string_view path) const {
  if (path == top_) return ViewEntry::Folder(top_);
  if (BelowTop(path) == kMetadataFile) return Metadata();
  if (const auto rank = RankOf(path)) return DataFile(*rank);
  return NotInView(path);
}

Result<Plan> DcpView::MakePlan(std::string_view file) const {
  if (BelowTop(file) == kMetadataFile) return dcp::MetadataPlan(index_);
  const auto rank = RankOf(file);
  if (!rank) return NotInView(file);
  PlanBuilder plan;
  CKPT_RETURN_IF_ERROR(index_->AppendFile(*rank, plan));
  return std::move(plan).Finish();
}

}  // namespace

Result<std::shared_ptr<const View>> OpenDcpPart(std::shared_ptr<const ShownState> shown,
                                                const KeyShape& keys, const DcpPart& part,
                                                uint64_t cut_from) {
  const Layout& layout = shown->layout();
  CKPT_RETURN_IF_ERROR(CheckDegrees(shown->step(), layout));
  CKPT_RETURN_IF_ERROR(shown->CheckNames());
  CKPT_ASSIGN_OR_RETURN(std::vector<dcp::Entry> entries, dcp::EntriesOf(*shown, keys));
  if (!part.only.empty()) {
    std::erase_if(entries, [&](const dcp::Entry& e) { return e.path.front().text != part.only; });
  }
  if (entries.empty()) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("the step holds no tensors", part.only.empty() ? "" : " of '", part.only,
                       part.only.empty() ? "" : "'"));
  }
  const dcp::Mesh mesh{layout.tp, uint64_t{layout.dp} * layout.cp};
  CKPT_ASSIGN_OR_RETURN(dcp::DirectoryIndex index,
                        dcp::DirectoryIndex::Build(std::move(entries), mesh, cut_from));
  return std::make_shared<const DcpView>(std::move(shown), part.top, std::move(index));
}

Result<std::shared_ptr<const View>> DcpFormat::Open(std::shared_ptr<const ShownState> shown) const {
  CKPT_ASSIGN_OR_RETURN(const KeyShape keys, dcp::KeysFor(shown->step(), shown->layout().keys));
  return OpenDcpPart(std::move(shown), keys, {std::string(kTop), ""}, cut_from_);
}

}  // namespace ckptfs
