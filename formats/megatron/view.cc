// SPDX-License-Identifier: Apache-2.0

#include "formats/megatron/view.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/model/left_out.h"
#include "core/view/shard.h"
#include "core/view/view_tree.h"
#include "formats/dcp/metadata_writer.h"
#include "formats/megatron/common_file.h"
#include "formats/megatron/dist_directory.h"
#include "formats/megatron/dist_keys.h"
#include "formats/megatron/view_entries.h"
#include "formats/tools/model_files.h"
#include "formats/tools/source_traits.h"

namespace ckptfs {
namespace {

constexpr std::string_view kTop = "megatron";
constexpr std::string_view kRelease = "release";
// The folder in common.pt's zip.
constexpr std::string_view kCommonFolder = "common";
// Cores up to 0.18 take these four keys and no other.
constexpr std::string_view kBackend =
    R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, )"
    R"("common_backend": "torch", "common_backend_version": 1})";

// A step under megatron-core's names, and why it does not have its optimizer.
struct Named {
  std::shared_ptr<const ShownState> shown;
  std::optional<Error> without_optimizer;
};

ViewTree::Text TextOf(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

// Its names are Megatron's own.
bool IsOfMegatron(const StepModel& step) { return TraitsOf(step).mcore_state; }

// The files of the directory; its keys are the entries'.
class Composer {
 public:
  Composer(const ShownState& shown, std::shared_ptr<ViewTree> tree)
      : shown_(shown), tree_(std::move(tree)) {}

  // Megatron takes no iteration 0: such a step is what it calls a release, whose weights a job
  // begins with.
  void AddMarks() {
    const StepModel& step = shown_.step();
    const std::string iteration = std::to_string(step.iteration);
    const bool release = step.iteration == 0 || (IsOfMegatron(step) && step.id == kRelease);
    const std::string zeros(iteration.size() < 7 ? 7 - iteration.size() : 0, '0');
    const std::string name = release ? std::string(kRelease) : StrCat("iter_", zeros, iteration);
    folder_ = StrCat(kTop, "/", name);
    tree_->AddText(StrCat(kTop, "/", megatron::kTrackerFile), TextOf(release ? name : iteration));
    tree_->AddText(StrCat(folder_, "/", megatron::kBackendFile), TextOf(std::string(kBackend)));
  }

  Status AddCommon(ArchiveContent content) {
    CKPT_ASSIGN_OR_RETURN(const uint64_t size, content.Size(kCommonFolder));
    const auto kept = std::make_shared<const ArchiveContent>(std::move(content));
    tree_->AddMade(
        StrCat(folder_, "/", megatron::kCommonFile), size, Reading::kCopied,
        [kept]() -> Result<Plan> { return ArchiveContent(*kept).MakePlan(kCommonFolder); }, size);
    return {};
  }

  void AddTensors(std::shared_ptr<const dcp::BoxIndex> index) {
    tree_->AddMade(
        StrCat(folder_, "/.metadata"), dcp::MetadataSize(*index), Reading::kRandom,
        [index]() -> Result<Plan> { return dcp::MetadataPlan(index); }, index->MemoryBytes());
    for (uint64_t file = 0; file < index->ranks(); ++file) {
      if (index->FileSize(file) == 0) continue;
      tree_->AddMade(StrCat(folder_, "/", dcp::DataFileName(file)), index->FileSize(file),
                     Reading::kOnce, [index, file]() -> Result<Plan> {
                       PlanBuilder plan;
                       CKPT_RETURN_IF_ERROR(index->AppendFile(file, plan));
                       return std::move(plan).Finish();
                     });
    }
  }

 private:
  const ShownState& shown_;
  const std::shared_ptr<ViewTree> tree_;
  std::string folder_;
};

// A parameter that keeps its name is one that no rule knows: Megatron's model would be built
// without it, and be another.
Status CheckAllRenamed(const StepModel& source, const StepModel& named) {
  if (&source == &named) return {};
  for (const Parameter& parameter : named.parameters) {
    if (parameter.role == Role::kBuffer || parameter.role == Role::kBeside ||
        !source.FindParameter(parameter.name))
      continue;
    return Fail(Error{ErrorCode::kUnsupported,
                      "Megatron's model does not have this parameter, as "
                      "far as the table of its names tells"}
                    .OfParameter(parameter.name));
  }
  return {};
}

Result<Named> NamedAs(Translations& translations, std::shared_ptr<const ShownState> shown) {
  if (IsOfMegatron(shown->step())) {
    for (const Parameter& parameter : shown->step().parameters) {
      if (!megatron::StackedNameOf(parameter.name)) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        "it is of all layers, as a snapshot of a running job has it"}
                      .OfParameter(parameter.name)
                      .Needing("the directory that the job saved loads it at any degrees, by "
                               "dist_checkpointing.load where ckptfs.megatron is imported"));
    }
    return Named{std::move(shown), std::nullopt};
  }
  const Layout& layout = shown->layout();
  auto all = translations.To(shown->shared_step(), Dialect::kMcore);
  if (all) {
    CKPT_RETURN_IF_ERROR(CheckAllRenamed(shown->step(), **all));
    return Named{ShownState::Of(*std::move(all), layout), std::nullopt};
  }
  auto weights = translations.To(shown->shared_step(), Dialect::kMcore, Carried::kWeights);
  if (!weights) return Fail(std::move(weights).error().WithContext("names of megatron-core"));
  CKPT_RETURN_IF_ERROR(CheckAllRenamed(shown->step(), **weights));
  return Named{ShownState::Of(*std::move(weights), layout), std::move(all).error()};
}

std::string WithoutOptimizer(std::string_view why) {
  return StrCat("the optimizer: ", why, "; a job that loads this begins a new one");
}

}  // namespace

Result<std::shared_ptr<const ShownState>> AsMcore(Translations& translations,
                                                  std::shared_ptr<const ShownState> shown) {
  CKPT_ASSIGN_OR_RETURN(Named named, NamedAs(translations, std::move(shown)));
  return std::move(named.shown);
}

Result<std::shared_ptr<const View>> MegatronFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  CKPT_RETURN_IF_ERROR(CheckDegrees(shown->step(), shown->layout()));
  CKPT_ASSIGN_OR_RETURN(Named named, NamedAs(*translations_, shown));
  const ShownState& state = *named.shown;
  CKPT_RETURN_IF_ERROR(state.CheckNames());
  auto tree = std::make_shared<ViewTree>(named.shown);

  auto groups = megatron::TargetGroupsOf(state);
  if (!groups) {
    if (groups.error().code != ErrorCode::kUnsupported) return Fail(std::move(groups).error());
    named.without_optimizer = std::move(groups).error();
    groups = std::optional<megatron::TargetGroups>();
  }
  if (named.without_optimizer) tree->LeaveOut(WithoutOptimizer(named.without_optimizer->message));
  const std::vector<LeftOut>& left_out = state.step().left_out;
  const auto lacking = std::ranges::find(left_out, LeftOutPart::kOptimizer, &LeftOut::part);
  if (!*groups && !named.without_optimizer && lacking != left_out.end()) {
    tree->LeaveOut(WithoutOptimizer(LeftOutText(*lacking)));
  }
  if (*groups) {
    for (const std::string& note : (*groups)->notes) tree->LeaveOut(note);
  }

  megatron::ViewRequest request;
  request.optimizer = groups->has_value();
  request.cut_from = cut_from_;
  CKPT_ASSIGN_OR_RETURN(auto entries, megatron::EntriesOf(state, request));
  CKPT_ASSIGN_OR_RETURN(dcp::BoxIndex index,
                        dcp::BoxIndex::Build(std::move(entries), state.layout().tp));

  const std::string* config = ChosenModelFiles(state.step().facts, given_).config();
  CKPT_ASSIGN_OR_RETURN(
      ArchiveContent common,
      megatron::CommonFile(state, *groups, config == nullptr ? "" : std::string_view(*config)));

  Composer composer(state, tree);
  composer.AddMarks();
  CKPT_RETURN_IF_ERROR(composer.AddCommon(std::move(common)));
  composer.AddTensors(std::make_shared<const dcp::BoxIndex>(std::move(index)));
  return tree;
}

}  // namespace ckptfs
