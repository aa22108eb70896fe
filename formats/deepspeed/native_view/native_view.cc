// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/native_view/native_view.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/view/plan.h"
#include "formats/deepspeed/native_view/partitions.h"
#include "formats/deepspeed/native_view/rank_states.h"
#include "formats/deepspeed/native_view/target_engine.h"

namespace ckptfs::deepspeed {
namespace {

constexpr std::string_view kTop = "deepspeed_native";
constexpr std::string_view kLatest = "latest";
// Memory of a parameter in a flat group, whose local tensor has a piece or some.
constexpr uint64_t kMemberBytes = sizeof(FlatMember) + 256;

struct RankFile {
  bool model = false;
  RankCoordinate rank;

  // The folder in its zip, so that equal files are equal.
  std::string_view folder() const { return model ? "model_states" : "optim_states"; }
  // All data-parallel ranks read one model file at stages 1 and 2.
  Reading reading() const { return model ? Reading::kCopied : Reading::kOnce; }
};

// By name.
std::map<std::string, RankFile, std::less<>> FilesOf(const TargetEngine& engine) {
  std::map<std::string, RankFile, std::less<>> files;
  RankCoordinate at;
  for (; at.tp < engine.tp; ++at.tp) {
    at.dp = 0;
    const std::string mp = StrCat("mp_rank_", at.tp < 10 ? "0" : "", at.tp);
    if (engine.stage < 3) files[StrCat(mp, "_model_states.pt")] = {true, at};
    for (; at.dp < engine.dp; ++at.dp) {
      const std::string rank = StrCat("zero_pp_rank_", at.dp, "_", mp);
      if (engine.stage == 3) files[StrCat(rank, "_model_states.pt")] = {true, at};
      files[StrCat(engine.bf16 ? "bf16_" : "", rank, "_optim_states.pt")] = {false, at};
    }
  }
  return files;
}

class NativeView : public View {
 public:
  NativeView(std::shared_ptr<const ShownState> shown, TargetEngine engine,
             std::vector<std::string> left_out)
      : View(shown->shared_step()),
        shown_(std::move(shown)),
        engine_(std::move(engine)),
        left_out_(std::move(left_out)),
        tag_(StrCat(kTop, "/", shown_->step().id)),
        files_(FilesOf(engine_)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override {
    if (directory.empty()) return std::vector{ViewEntry::Folder(kTop)};
    if (directory == kTop) return std::vector{Latest(), ViewEntry::Folder(shown_->step().id)};
    if (directory != tag_) return NotInView(directory);
    std::vector<ViewEntry> out;
    for (const auto& [name, file] : files_) {
      CKPT_ASSIGN_OR_RETURN(const uint64_t size, SizeOf(file));
      out.push_back(ViewEntry::File(name, size, file.reading()));
    }
    return out;
  }

  Result<ViewEntry> Find(std::string_view path) const override {
    if (path == kTop) return ViewEntry::Folder(kTop);
    if (path == tag_) return ViewEntry::Folder(shown_->step().id);
    if (path == StrCat(kTop, "/", kLatest)) return Latest();
    const auto file = FileAt(path);
    if (file == files_.end()) return NotInView(path);
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, SizeOf(file->second));
    return ViewEntry::File(file->first, size, file->second.reading());
  }

  Result<Plan> MakePlan(std::string_view path) const override {
    if (path == StrCat(kTop, "/", kLatest)) {
      PlanBuilder plan;
      plan.Literal(shown_->step().id);
      return std::move(plan).Finish();
    }
    const auto file = FileAt(path);
    if (file == files_.end()) return NotInView(path);
    CKPT_ASSIGN_OR_RETURN(ArchiveContent content, ContentOf(file->second));
    return std::move(content).MakePlan(file->second.folder());
  }

  std::vector<std::string> LeftOut() const override { return left_out_; }

  uint64_t MemoryBytes() const override {
    constexpr uint64_t kNode = sizeof(std::string) + sizeof(RankFile) + 64;
    uint64_t bytes = sizeof(*this) + 2 * files_.size() * kNode;
    for (const auto& group : engine_.groups) {
      bytes += group.capacity() * (sizeof(ParameterIndex) + engine_.tp * kMemberBytes);
    }
    for (const std::string& line : left_out_) bytes += sizeof(line) + line.capacity();
    return bytes;
  }

 private:
  using Groups = std::vector<FlatGroup>;
  using Files = std::map<std::string, RankFile, std::less<>>;

  ViewEntry Latest() const {
    return ViewEntry::File(kLatest, shown_->step().id.size(), Reading::kCopied);
  }

  Files::const_iterator FileAt(std::string_view path) const {
    const size_t slash = path.rfind('/');
    if (slash == path.npos || path.substr(0, slash) != tag_) return files_.end();
    return files_.find(path.substr(slash + 1));
  }

  Result<std::shared_ptr<const Groups>> GroupsOf(const RankCoordinate& rank) const {
    {
      MutexLock lock(mutex_);
      const auto known = groups_.find(rank.tp);
      if (known != groups_.end()) return known->second;
    }
    CKPT_ASSIGN_OR_RETURN(Groups groups, FlatGroupsOf(*shown_, engine_, rank));
    auto kept = std::make_shared<const Groups>(std::move(groups));
    MutexLock lock(mutex_);
    return groups_.emplace(rank.tp, std::move(kept)).first->second;
  }

  Result<ArchiveContent> ContentOf(const RankFile& file) const {
    CKPT_ASSIGN_OR_RETURN(const auto groups, GroupsOf(file.rank));
    return file.model ? ModelStatesOf(*shown_, engine_, *groups, file.rank)
                      : OptimizerStatesOf(*shown_, engine_, *groups, file.rank);
  }

  // Slices of stage 3 are equally long on all data-parallel ranks.
  Result<uint64_t> SizeOf(const RankFile& file) const {
    const uint32_t dp = engine_.stage == 3 ? 0 : file.rank.dp;
    const auto key = std::tuple(file.model, file.rank.tp, dp);
    {
      MutexLock lock(mutex_);
      const auto known = sizes_.find(key);
      if (known != sizes_.end()) return known->second;
    }
    CKPT_ASSIGN_OR_RETURN(const ArchiveContent content, ContentOf(file));
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, content.Size(file.folder()));
    MutexLock lock(mutex_);
    return sizes_.emplace(key, size).first->second;
  }

  const std::shared_ptr<const ShownState> shown_;
  const TargetEngine engine_;
  const std::vector<std::string> left_out_;
  const std::string tag_;  // its folder
  const Files files_;
  mutable Mutex mutex_;
  mutable std::map<uint32_t, std::shared_ptr<const Groups>> groups_ GUARDED_BY(mutex_);  // by tp
  mutable std::map<std::tuple<bool, uint32_t, uint32_t>, uint64_t> sizes_ GUARDED_BY(mutex_);
};

// Lines on the engines of the layout that the files are not for.
std::vector<std::string> LinesOf(const TargetEngine& engine, size_t flat_groups) {
  std::vector<std::string> lines = engine.others;
  if (flat_groups > engine.groups.size()) {
    lines.push_back(StrCat("sub-groups for an engine whose sub_group_size is not ",
                           engine.sub_group_size,
                           ", as the source's configuration has it: such an engine refuses them"));
  }
  return lines;
}

}  // namespace

Result<std::shared_ptr<const View>> NativeFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  CKPT_ASSIGN_OR_RETURN(TargetEngine engine, TargetEngineOf(*shown));
  CKPT_RETURN_IF_ERROR(shown->CheckNames());
  const std::string& tag = shown->step().id;
  if (tag.empty() || tag == "." || tag == ".." || tag == kLatest || tag.size() > 255 ||
      tag.find('/') != std::string::npos || tag.find('\0') != std::string::npos) {
    return Fail(ErrorCode::kUnsupported, StrCat("tag '", tag.substr(0, 300),
                                                "' cannot be the name of a directory beside "
                                                "'latest'"));
  }
  // A state that no rank can have is refused here, and not in a file.
  const RankCoordinate first;
  CKPT_ASSIGN_OR_RETURN(const auto groups, FlatGroupsOf(*shown, engine, first));
  CKPT_RETURN_IF_ERROR(ModelStatesOf(*shown, engine, groups, first));
  CKPT_RETURN_IF_ERROR(OptimizerStatesOf(*shown, engine, groups, first));
  std::vector<std::string> lines = LinesOf(engine, groups.size());
  return std::make_shared<const NativeView>(std::move(shown), std::move(engine), std::move(lines));
}

}  // namespace ckptfs::deepspeed
