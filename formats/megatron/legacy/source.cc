// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/legacy/source.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/dist_directory.h"
#include "formats/megatron/legacy/reader.h"
#include "formats/megatron/legacy/step_files.h"
#include "formats/tools/directories.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {
namespace {

using RootPointer = std::shared_ptr<const Root>;

class MegatronLegacySource : public Source {
 public:
  std::string_view name() const override { return "megatron_legacy"; }

  Result<std::vector<StepCandidate>> Find(const RootPointer& root,
                                          const std::string& directory) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root->Stat(directory));
    if (itself.kind != EntryKind::kDirectory) return out;
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
    CKPT_ASSIGN_OR_RETURN(const bool own, megatron::HasRankFiles(*root, directory, entries));
    if (own) {
      const std::string name = LastComponent(root->PathOf(directory));
      CKPT_RETURN_IF_ERROR(Add(root, directory, RunOfToolStep(directory, name), out));
      return out;
    }
    for (const std::string& inner : entries.directories) {
      const std::string path = JoinPath(directory, inner);
      const auto below = ListStepEntries(*root, path);
      if (!below && !IsOutOfReach(below.error())) return Fail(Error(below.error()));
      if (!below) continue;
      CKPT_ASSIGN_OR_RETURN(const bool there, megatron::HasRankFiles(*root, path, *below));
      if (there) CKPT_RETURN_IF_ERROR(Add(root, path, directory, out));
    }
    if (out.empty()) return out;
    CKPT_ASSIGN_OR_RETURN(const auto latest, megatron::ReadTracker(*root, directory));
    if (!latest) return out;
    for (StepCandidate& step : out) step.latest = step.id == *latest;
    CKPT_ASSIGN_OR_RETURN(const bool named, HasDirectory(*root, JoinPath(directory, *latest)));
    if (!named) out.push_back(Pointer(root, directory));
    return out;
  }

  SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                    const SaveHistory& history) const override {
    if (step.pointer) return {SavePhase::kAbsent, {}, PointsNowhere(step)};
    auto files = megatron::ReadLegacyFiles(*step.root, step.directory, options.weights_only);
    if (!files) return SaveState::Begun(std::move(files).error());
    SavePlaces places;
    // A tracker of an earlier step says nothing of this one's save.
    const auto tracker = megatron::ReadTracker(*step.root, step.save);
    if (!tracker) return SaveState::Begun(tracker.error());
    if (*tracker && (**tracker == step.id || StepNumber(**tracker).value_or(0) > step.iteration)) {
      places.format = FormatOrder::kMegatronLegacy;
    }
    return StateOfSave(step, places, options, history);
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    if (!options.model.empty()) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(step.Path(), ": --model: Megatron's ranks have one model"));
    }
    CKPT_ASSIGN_OR_RETURN(
        megatron::LegacyFiles files,
        megatron::ReadLegacyFiles(*step.root, step.directory, options.weights_only));
    return megatron::LegacyReader(step, options, std::move(files)).Read();
  }

 private:
  static Status Add(const RootPointer& root, const std::string& directory, const std::string& save,
                    std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, StepAt(root, directory, save));
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
    for (const std::string& folder : entries.directories) {
      if (!megatron::IsRankFolder(folder)) continue;
      CKPT_ASSIGN_OR_RETURN(const int64_t newest, NewestEntry(*root, JoinPath(directory, folder)));
      step.mtime_ns = std::max(step.mtime_ns, newest);
    }
    out.push_back(std::move(step));
    return {};
  }

  static StepCandidate Pointer(const RootPointer& root, const std::string& directory) {
    StepCandidate out;
    out.root = root;
    out.save = directory;
    out.id = megatron::kTrackerFile;
    out.directory = JoinPath(directory, out.id);
    out.pointer = true;
    return out;
  }

  static Error PointsNowhere(const StepCandidate& step) {
    const auto named = megatron::ReadTracker(*step.root, step.save);
    if (!named) return named.error();
    return {ErrorCode::kInvalid, StrCat(step.Path(), ": names the step '", named->value_or(""),
                                        "', but that directory does not exist")};
  }
};

}  // namespace

std::unique_ptr<Source> MakeMegatronLegacySource() {
  return std::make_unique<MegatronLegacySource>();
}

}  // namespace ckptfs
