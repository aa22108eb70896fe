// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/view.h"

#include <map>
#include <string>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/view/plan.h"
#include "core/view/shard.h"
#include "formats/megatron/dist_directory.h"
#include "formats/megatron/legacy/rank_content.h"
#include "formats/megatron/legacy/rank_model.h"
#include "formats/megatron/legacy/rank_places.h"
#include "formats/megatron/view.h"

namespace ckptfs {
namespace {

constexpr std::string_view kView = "megatron_legacy";
constexpr std::string_view kReleased = "release";
// The folder in a rank's zip.
constexpr std::string_view kArchive = "model_optim_rng";

class LegacyView : public View {
 public:
  LegacyView(std::shared_ptr<const ShownState> shown, std::string config)
      : View(shown->shared_step()), shown_(std::move(shown)), config_(std::move(config)) {
    const Layout& layout = shown_->layout();
    megatron::JobDegrees job;
    job.tp = job.etp = layout.tp;
    job.pp = layout.pp;
    job.ep = layout.ep;
    for (uint64_t rank = 0; rank < layout.World(); ++rank) {
      const RankCoordinate at = CoordinateOf(layout, rank);
      ranks_.try_emplace(megatron::FolderOf(job, {at.tp, at.pp, at.ep, at.etp}), at);
    }
  }

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override {
    std::vector<ViewEntry> out;
    if (directory.empty()) return std::vector{ViewEntry::Folder(kView)};
    if (directory == kView) return std::vector{Tracker(), ViewEntry::Folder(kReleased)};
    if (directory == Release()) {
      for (const auto& [folder, at] : ranks_) out.push_back(ViewEntry::Folder(folder));
      return out;
    }
    CKPT_ASSIGN_OR_RETURN(const RankCoordinate at, RankAt(directory));
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, SizeOf(std::string(LastOf(directory)), at));
    out.push_back(ViewEntry::File(megatron::kRankFile, size, Reading::kOnce));
    return out;
  }

  Result<ViewEntry> Find(std::string_view path) const override {
    if (path == kView || path == Release()) return ViewEntry::Folder(LastOf(path));
    if (path == TrackerPath()) return Tracker();
    if (const auto folder = RankAt(path)) return ViewEntry::Folder(LastOf(path));
    CKPT_ASSIGN_OR_RETURN(const RankCoordinate at, FileAt(path));
    const std::string folder(LastOf(path.substr(0, path.rfind('/'))));
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, SizeOf(folder, at));
    return ViewEntry::File(megatron::kRankFile, size, Reading::kOnce);
  }

  Result<Plan> MakePlan(std::string_view file) const override {
    if (file == TrackerPath()) {
      PlanBuilder plan;
      plan.Literal(std::string(kReleased));
      return std::move(plan).Finish();
    }
    CKPT_ASSIGN_OR_RETURN(const RankCoordinate at, FileAt(file));
    CKPT_ASSIGN_OR_RETURN(ArchiveContent content, megatron::RankContent(*shown_, at, config_));
    return std::move(content).MakePlan(kArchive);
  }

  uint64_t MemoryBytes() const override {
    constexpr uint64_t kNode = 2 * (sizeof(std::string) + sizeof(RankCoordinate) + 64);
    return sizeof(*this) + config_.size() + ranks_.size() * kNode;
  }

 private:
  static std::string Release() { return StrCat(kView, "/", kReleased); }
  static std::string TrackerPath() { return StrCat(kView, "/", megatron::kTrackerFile); }
  static ViewEntry Tracker() {
    return ViewEntry::File(megatron::kTrackerFile, kReleased.size(), Reading::kCopied);
  }
  static std::string_view LastOf(std::string_view path) { return path.substr(path.rfind('/') + 1); }

  // The rank of a folder's path.
  Result<RankCoordinate> RankAt(std::string_view path) const {
    const size_t slash = path.rfind('/');
    if (slash == path.npos || path.substr(0, slash) != Release()) return NotInView(path);
    const auto found = ranks_.find(path.substr(slash + 1));
    if (found == ranks_.end()) return NotInView(path);
    return found->second;
  }
  Result<RankCoordinate> FileAt(std::string_view path) const {
    const size_t slash = path.rfind('/');
    if (slash == path.npos || path.substr(slash + 1) != megatron::kRankFile) return NotInView(path);
    return RankAt(path.substr(0, slash));
  }

  Result<uint64_t> SizeOf(const std::string& folder, const RankCoordinate& at) const {
    {
      MutexLock lock(mutex_);
      const auto found = sizes_.find(folder);
      if (found != sizes_.end()) return found->second;
    }
    CKPT_ASSIGN_OR_RETURN(const ArchiveContent content,
                          megatron::RankContent(*shown_, at, config_));
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, content.Size(kArchive));
    MutexLock lock(mutex_);
    return sizes_.emplace(folder, size).first->second;
  }

  const std::shared_ptr<const ShownState> shown_;
  const std::string config_;
  std::map<std::string, RankCoordinate, std::less<>> ranks_;  // the first of each folder's
  mutable Mutex mutex_;
  mutable std::map<std::string, uint64_t> sizes_ GUARDED_BY(mutex_);  // of files, by folder
};

}  // namespace

Result<std::shared_ptr<const View>> MegatronLegacyFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  CKPT_RETURN_IF_ERROR(CheckDegrees(shown->step(), shown->layout()));
  CKPT_ASSIGN_OR_RETURN(const auto named, AsMcore(*translations_, std::move(shown)));
  CKPT_RETURN_IF_ERROR(CheckLayout(named->step(), named->layout()));
  CKPT_RETURN_IF_ERROR(named->CheckNames());
  CKPT_RETURN_IF_ERROR(megatron::CheckLegacyLayout(*named));
  const std::string* config = ChosenModelFiles(named->step().facts, given_).config();
  const std::string text = config == nullptr ? "" : *config;
  // What no rank can have is a refusal here, and not in a file.
  CKPT_RETURN_IF_ERROR(megatron::RankContent(*named, RankCoordinate{}, text));
  return std::make_shared<const LegacyView>(named, text);
}

}  // namespace ckptfs
