// SPDX-License-Identifier: Apache-2.0

#include "formats/rank_shards/source.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "formats/rank_shards/reader.h"
#include "formats/rank_shards/step_files.h"
#include "formats/tools/directories.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {
namespace {

using rank_shards::StepFiles;
using RootPointer = std::shared_ptr<const Root>;

constexpr std::string_view kStepStart = "global_step_";

std::string NameOf(const Root& root, const std::string& directory) {
  return LastComponent(root.PathOf(directory));
}

bool IsStepName(std::string_view name) { return name.starts_with(kStepStart) && StepNumber(name); }

class RankShardsSource : public Source {
 public:
  std::string_view name() const override { return "rank_shards"; }

  Result<std::vector<StepCandidate>> Find(const RootPointer& root,
                                          const std::string& directory) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root->Stat(directory));
    if (itself.kind != EntryKind::kDirectory) return out;
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
    if (rank_shards::HasFiles(entries)) {
      CKPT_RETURN_IF_ERROR(AddModel(root, directory, out));
      return out;
    }
    if (IsStepName(NameOf(*root, directory))) {
      CKPT_RETURN_IF_ERROR(AddStep(root, directory, out));
      return out;
    }
    for (const std::string& inner : entries.directories) {
      if (!IsStepName(inner)) continue;
      Status added = AddStep(root, JoinPath(directory, inner), out);
      if (!added && !IsOutOfReach(added.error())) return Fail(std::move(added).error());
    }
    return out;
  }

  SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                    const SaveHistory& history) const override {
    const auto files = List(step);
    if (!files) return SaveState::Begun(files.error());
    Status whole = CheckWhole(*files, step.Path(), options.weights_only);
    if (!whole) return SaveState::Begun(std::move(whole).error());
    SavePlaces places;
    // A tracker of an earlier step says nothing of this one's save.
    const auto tracker = rank_shards::FindTracker(*step.root, step.save);
    if (!tracker) return SaveState::Begun(tracker.error());
    if (*tracker && (*tracker)->number && *(*tracker)->number >= step.iteration) {
      places.format = (*tracker)->format;
    }
    return StateOfSave(step, places, options, history);
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    CKPT_ASSIGN_OR_RETURN(StepFiles files, List(step));
    CKPT_RETURN_IF_ERROR(CheckWhole(files, step.Path(), options.weights_only));
    return rank_shards::Reader(step, options, std::move(files)).Read();
  }

 private:
  static Result<StepFiles> List(const StepCandidate& step) {
    CKPT_ASSIGN_OR_RETURN(auto files, rank_shards::ListFiles(*step.root, step.directory));
    if (files) return *std::move(files);
    return Refuse(step.Path(), ": no model_world_size_*_rank_*.pt");
  }

  // A step's directory: its files lie in it, or in a folder for each model.
  static Status AddStep(const RootPointer& root, const std::string& own,
                        std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, own));
    if (rank_shards::HasFiles(entries)) return Add(root, own, own, ParentPath(own), out);
    CKPT_ASSIGN_OR_RETURN(const auto folders, rank_shards::ModelFolders(*root, own));
    return folders.empty() ? Status()
                           : Add(root, JoinPath(own, folders[0]), own, ParentPath(own), out);
  }

  // A directory of one model that was given by itself.
  static Status AddModel(const RootPointer& root, const std::string& directory,
                         std::vector<StepCandidate>& out) {
    if (IsStepName(NameOf(*root, directory))) return AddStep(root, directory, out);
    const std::string above = ParentPath(directory);
    if (above.empty() || !IsStepName(NameOf(*root, above))) {
      return Add(root, directory, directory, directory, out);
    }
    CKPT_ASSIGN_OR_RETURN(const auto folders, rank_shards::ModelFolders(*root, above));
    const bool first = !folders.empty() && JoinPath(above, folders[0]) == directory;
    return first ? AddStep(root, above, out) : Add(root, directory, directory, above, out);
  }

  static Status Add(const RootPointer& root, const std::string& directory, const std::string& own,
                    const std::string& save, std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, StepAt(root, directory, save));
    step.own = own;
    step.id = NameOf(*root, own);
    const auto number = StepNumber(step.id);
    step.iteration = number ? *number : StepNumber(NameOf(*root, save)).value_or(0);
    CKPT_ASSIGN_OR_RETURN(const int64_t around, NewestEntry(*root, own));
    step.mtime_ns = std::max(step.mtime_ns, around);
    CKPT_ASSIGN_OR_RETURN(const auto tracker, rank_shards::FindTracker(*root, save));
    step.latest = number && tracker && tracker->number == number;
    out.push_back(std::move(step));
    return {};
  }
};

}  // namespace

std::unique_ptr<Source> MakeRankShardsSource() { return std::make_unique<RankShardsSource>(); }

}  // namespace ckptfs
