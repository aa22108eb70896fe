// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/source.h"

#include <utility>

#include "core/base/strings.h"
#include "formats/megatron/dist_directory.h"
#include "formats/megatron/reader.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {
namespace {

using megatron::DistFiles;
using megatron::ListDist;

class MegatronSource : public Source {
 public:
  std::string_view name() const override { return "megatron"; }

  Result<std::vector<StepCandidate>> Find(const std::shared_ptr<const Root>& root,
                                          const std::string& directory) const override {
    std::vector<StepCandidate> out;
    CKPT_ASSIGN_OR_RETURN(const EntryStat itself, root->Stat(directory));
    if (itself.kind != EntryKind::kDirectory) return out;
    const std::string name = LastComponent(root->PathOf(directory));
    CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
    CKPT_ASSIGN_OR_RETURN(const DistFiles own, megatron::DistOf(*root, directory, entries.files));
    if (own.IsDist()) {
      CKPT_RETURN_IF_ERROR(Add(root, directory, RunOfToolStep(directory, name), out));
      return out;
    }
    for (const std::string& inner : entries.directories) {
      const auto files = ListDist(*root, JoinPath(directory, inner));
      if (!files && !IsOutOfReach(files.error())) return Fail(Error(files.error()));
      if (!files || !files->IsDist()) continue;
      CKPT_RETURN_IF_ERROR(Add(root, JoinPath(directory, inner), directory, out));
    }
    if (out.empty()) return out;
    CKPT_ASSIGN_OR_RETURN(const auto latest, megatron::ReadTracker(*root, directory));
    for (StepCandidate& step : out) step.latest = latest && step.id == *latest;
    return out;
  }

  SaveState StateOf(const StepCandidate& step, const SourceOptions& options,
                    const SaveHistory& history) const override {
    auto files = ListDist(*step.root, step.directory);
    if (!files) return SaveState::Begun(std::move(files).error());
    if (Status whole = megatron::CheckFiles(*step.root, step.directory, *files); !whole) {
      return SaveState::Begun(std::move(whole).error());
    }
    SavePlaces places{.own = step.Own(), .format = FormatOrder::kMegatron};
    places.parts.push_back(step.directory);
    return StateOfSave(step, places, options, history);
  }

  Result<StepModel> Read(const StepCandidate& step, const SourceOptions& options) const override {
    if (!options.model.empty()) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(step.Path(), ": --model: a torch_dist directory has one model"));
    }
    CKPT_ASSIGN_OR_RETURN(const DistFiles files, ListDist(*step.root, step.directory));
    CKPT_RETURN_IF_ERROR(megatron::CheckFiles(*step.root, step.directory, files));
    return megatron::Reader(step, options).Read();
  }

 private:
  static Status Add(const std::shared_ptr<const Root>& root, const std::string& directory,
                    const std::string& save, std::vector<StepCandidate>& out) {
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, StepAt(root, directory, save));
    out.push_back(std::move(step));
    return {};
  }
};

}  // namespace

std::unique_ptr<Source> MakeMegatronSource() { return std::make_unique<MegatronSource>(); }

}  // namespace ckptfs
