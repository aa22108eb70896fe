// SPDX-License-Identifier: Apache-2.0

#include "formats/resume/resume_view.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/io/root.h"
#include "core/view/view_tree.h"
#include "formats/dcp/entries.h"
#include "formats/dcp/step_files.h"
#include "formats/dcp/view.h"
#include "formats/deepspeed/names.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/rank/rank_view.h"
#include "formats/resume/plain_optimizer.h"
#include "formats/tools/save_order.h"
#include "formats/tools/source_traits.h"
#include "formats/tools/step_tree.h"
#include "formats/tools/tool_files.h"

namespace ckptfs {
namespace {

constexpr std::string_view kUniversal = "deepspeed";  // the universal view's name
constexpr std::string_view kPointers[] = {"latest", "latest_universal"};
// accelerate/utils/fsdp_utils.py 1.15: FSDP_MODEL_NAME and OPTIMIZER_NAME, each with the number
// of the model.
constexpr std::string_view kFsdpModel = "pytorch_model_fsdp_";
constexpr std::string_view kFsdpOptimizer = "optimizer_";
constexpr std::string_view kWeights = "model.safetensors";
constexpr std::string_view kRank = "rank0/";  // of the rank view, whose file has the weights
constexpr std::string_view kWhyNot = "ckptfs.txt";
constexpr std::string_view kArchive = "archive";

std::string_view TopOf(StepTool tool) {
  if (tool == StepTool::kTrainer) return "trainer";
  return tool == StepTool::kAccelerate ? "accelerate" : "lightning";
}

// The tag that the tool's engine is told to load, or finds by itself.
std::string TagOf(StepTool tool, const StepModel& step) {
  if (tool == StepTool::kTrainer) return StrCat("global_step", step.iteration);
  return tool == StepTool::kAccelerate ? "pytorch_model" : "checkpoint";
}

// One of DeepSpeed's files of states, by its name: a job may have written others that end alike.
bool IsStates(std::string_view path) {
  if (path.ends_with("/zero/optimizer_state.pt")) return true;
  deepspeed::StepFiles found;
  return deepspeed::ClassifyFile(LastComponent(path), found) && found.IsDeepSpeed();
}

// All files that the tool wrote, those that lie in other files of the store by now, too.
std::set<std::string> PathsOf(const ToolFiles& files) {
  std::set<std::string> paths = files.packed;
  for (const auto& [path, blob] : files.files) paths.insert(path);
  return paths;
}

// The path of the step's own tag below its own directory: where its states are read
// from, "" where they lie in that itself.
std::string OwnTag(const StepModel& step, const ToolFiles& files) {
  for (const std::string& path : PathsOf(files)) {
    const size_t slash = path.find('/');
    if (TraitsOf(step).engine && slash != std::string::npos && IsStates(path)) {
      return path.substr(0, slash + 1);
    }
  }
  return "";
}

// The directories of DCP's that a step has, each with a '/' behind it.
std::set<std::string> OwnDcpParts(const StepModel& step, const ToolFiles& files) {
  std::set<std::string> parts;
  for (const std::string& path : PathsOf(files)) {
    const size_t slash = path.find('/');
    if (!TraitsOf(step).own_keys || slash == std::string::npos) continue;
    if (dcp::IsPartName(path.substr(0, slash))) parts.insert(path.substr(0, slash + 1));
  }
  return parts;
}

// The folders of a step whose files are states, which a view makes anew; each with a '/' behind.
std::set<std::string> StateFolders(const StepModel& step, const ToolFiles& files) {
  std::set<std::string> states = OwnDcpParts(step, files);
  const std::string tag = OwnTag(step, files);
  if (!tag.empty()) states.insert(tag);
  return states;
}

bool IsShownAsItIs(const std::string& path, const std::set<std::string>& states) {
  const bool pointer = std::ranges::find(kPointers, path) != std::end(kPointers);
  return !pointer && !states.contains(path.substr(0, path.find('/') + 1));
}

// A tool without DeepSpeed or FSDP keeps whole tensors in one file: there is nothing to re-lay.
Status CheckPlain(const Layout& layout, std::string_view tool) {
  if (layout.dtype) {
    return Fail(Error{ErrorCode::kUnsupported, StrCat(tool,
                                                      " can only resume with the dtype that "
                                                      "it saved")}
                    .Needing("leave the dtype out of the layout"));
  }
  if (layout.tp == 1 && layout.pp == 1 && layout.ep == 1) return {};
  return Fail(ErrorCode::kUnsupported,
              StrCat(tool, " without DeepSpeed saved whole tensors for data parallelism alone"));
}

// Files of weights as transformers and accelerate write them, of one model; whatever else a job
// wrote in such a format is its own.
bool IsWeights(std::string_view path) {
  if (path.find('/') != std::string_view::npos) return false;
  const std::string_view name = path.substr(0, path.find('.'));
  for (const std::string_view model : {"model", "pytorch_model"}) {
    if (!name.starts_with(model)) continue;
    const std::string_view rest = name.substr(model.size());
    const std::string_view type = path.substr(name.size());
    const bool known = type == ".safetensors" || type == ".bin" ||
                       type == ".safetensors.index.json" || type == ".bin.index.json";
    if (known && (rest.empty() || rest.starts_with("-"))) return true;
  }
  return false;
}

// The files that a tool resumes from: those of the source that are not states, and in the place of
// these what other formats make of what the layout shows.
class Composer {
 public:
  Composer(std::shared_ptr<const ShownState> shown, StepTool tool, const ToolFiles& files);

  // The directory of an engine, and the pointers to it.
  Status AddUniversal();
  // The one directory of Lightning's FSDPStrategy and ModelParallelStrategy, with the keys that the
  // strategy saved: what is in it stands beside the tool's own file.
  Status AddSharded();
  // The two directories of an FSDP job: of the weights, and of the optimizer if there is one.
  Status AddFsdp();
  // The files that the tool would load of a DeepSpeed step if it went on without DeepSpeed:
  // weights in the layout's dtype, and the optimizer, or why it is not there.
  Status AddPlain();
  // Trainer loads an optimizer where it finds a schedule beside it, and else says nothing.
  Status CheckSchedule() const;

  std::shared_ptr<const View> Finish() && { return std::move(tree_); }

 private:
  std::string PathOf(std::string_view name) const { return StrCat(top_, "/", name); }
  // The name of a file that stands at the top or below it.
  std::string_view NameOf(std::string_view path) const { return path.substr(top_.size() + 1); }
  bool HasOwnWeights() const;

  const std::shared_ptr<const ShownState> shown_;
  const StepModel& step_;
  const Layout& layout_;
  const StepTool tool_;
  const std::string_view top_;
  const std::string tag_;  // of the source's states
  const std::shared_ptr<ViewTree> tree_;
};

Composer::Composer(std::shared_ptr<const ShownState> shown, StepTool tool, const ToolFiles& files)
    : shown_(std::move(shown)),
      step_(shown_->step()),
      layout_(shown_->layout()),
      tool_(tool),
      top_(TopOf(tool)),
      tag_(OwnTag(step_, files)),
      tree_(std::make_shared<ViewTree>(shown_)) {
  const std::set<std::string> states = StateFolders(step_, files);
  for (const auto& [path, blob] : files.files) {
    if (IsShownAsItIs(path, states)) {
      tree_->AddBlob(PathOf(path), blob, GuessReading(LastComponent(path)));
    }
  }
}

Status Composer::AddUniversal() {
  auto universal = deepspeed::UniversalFormat().Open(shown_);
  // For another framework's step this is more than the tool saved.
  if (!universal && !TraitsOf(step_).engine) {
    tree_->LeaveOut(StrCat("DeepSpeed's directory: ", universal.error().message));
    return {};
  }
  if (!universal) return Fail(std::move(universal).error());
  const auto tag = std::make_shared<const std::string>(TagOf(tool_, step_));
  for (const std::string_view pointer : kPointers) tree_->AddText(PathOf(pointer), tag);
  return tree_->AddPart(PathOf(*tag), *std::move(universal), StrCat(kUniversal, "/", step_.id));
}

Status Composer::AddSharded() {
  if (!TraitsOf(step_).own_keys || layout_.keys != StateKeys::kAsSource) {
    return Fail(ErrorCode::kUnsupported,
                "Lightning's strategies ask for keys of their own: leave nested, flat, titan, "
                "accelerate and numbered out of the layout");
  }
  if (!tree_->Has(PathOf(kLightningMeta))) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("the file ", kLightningMeta,
                       " is missing in the step's directory; Lightning's strategies write it "
                       "beside DCP's files: dcp/ has the step for any mesh"));
  }
  CKPT_ASSIGN_OR_RETURN(const KeyShape keys, dcp::KeysFor(step_, layout_.keys));
  const std::string top(top_);
  CKPT_ASSIGN_OR_RETURN(const auto view, OpenDcpPart(shown_, keys, {top, ""}));
  tree_->Remove([](std::string_view path) { return dcp::IsFileName(LastComponent(path)); });
  CKPT_ASSIGN_OR_RETURN(const auto entries, view->List(top));
  for (const ViewEntry& entry : entries) {
    CKPT_RETURN_IF_ERROR(tree_->AddPart(PathOf(entry.name), view, PathOf(entry.name)));
  }
  return {};
}

Status Composer::AddFsdp() {
  if (layout_.keys != StateKeys::kAsSource && layout_.keys != StateKeys::kAccelerate) {
    return Fail(Error{ErrorCode::kUnsupported, StrCat(ToolName(tool_), " asks for keys of its own")}
                    .Needing("leave nested, flat, titan and numbered out of the layout"));
  }
  CKPT_ASSIGN_OR_RETURN(const KeyShape keys, dcp::KeysFor(step_, StateKeys::kAccelerate));
  const bool optimizer = !step_.groups.empty();
  for (const bool states : {false, true}) {
    if (states && !optimizer) continue;
    const std::string name = StrCat(states ? kFsdpOptimizer : kFsdpModel, 0);
    CKPT_ASSIGN_OR_RETURN(auto view,
                          OpenDcpPart(shown_, keys, {name, states ? keys.optimizer : keys.model}));
    CKPT_RETURN_IF_ERROR(tree_->AddPart(PathOf(name), std::move(view), name));
  }
  if (optimizer) {
    tree_->LeaveOut(
        "the optimizer's states under FSDP1: accelerate 1.15 asks for those of a fresh optimizer, "
        "which has none; under FSDP2 it takes them");
  }
  return {};
}

Status Composer::CheckSchedule() const {
  if (tool_ != StepTool::kTrainer || tree_->Has(PathOf("scheduler.pt"))) return {};
  return Fail(ErrorCode::kUnsupported,
              "Trainer loads an optimizer only beside a scheduler.pt, but the engine had the "
              "schedule");
}

// If one directory has several tags, the weights are those of one.
bool Composer::HasOwnWeights() const {
  const bool one =
      tag_.empty() || !step_.id.ends_with(StrCat("-", tag_.substr(0, tag_.size() - 1)));
  return one && tree_->Any([&](std::string_view path) {
    return IsWeights(NameOf(path)) || NameOf(path).starts_with("adapter_model.");
  });
}

Status Composer::AddPlain() {
  const std::string name = tool_ == StepTool::kTrainer ? "optimizer.pt" : "optimizer.bin";
  Status scheduled = CheckSchedule();
  auto optimizer = scheduled ? PlainOptimizer(*shown_)
                             : Result<ArchiveContent>(Fail(std::move(scheduled).error()));
  if (!optimizer) {
    std::string why =
        StrCat(name, " for a training without DeepSpeed: ", optimizer.error().message);
    tree_->AddText(PathOf(kWhyNot),
                   std::make_shared<const std::string>(StrCat("There is no ", why, "\n")));
    tree_->LeaveOut(std::move(why));
    return {};
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t size, optimizer->Size(kArchive));
  const auto make = [shown = shown_]() -> Result<Plan> {
    CKPT_ASSIGN_OR_RETURN(ArchiveContent content, PlainOptimizer(*shown));
    return std::move(content).MakePlan(kArchive);
  };
  tree_->AddMade(PathOf(name), size, Reading::kCopied, make);
  if (HasOwnWeights() && !layout_.dtype) return {};
  Layout whole;
  whole.dtype = layout_.dtype;
  whole.naming = layout_.naming;
  CKPT_ASSIGN_OR_RETURN(auto weights,
                        RankFormat().Open(ShownState::Of(shown_->shared_step(), whole)));
  tree_->Remove([&](std::string_view path) { return IsWeights(NameOf(path)); });
  return tree_->AddPart(PathOf(kWeights), std::move(weights), StrCat(kRank, kWeights));
}

constexpr std::string_view kNextEngine = "pytorch_model_";
constexpr std::string_view kSeveral =
    "': ckptfs does not re-lay several models or optimizers of one save; source/ has them as they "
    "were";

// accelerate numbers the directories of its models; a step has the tensors of one model.
Status CheckOneModel(const StepModel& step, const ToolFiles& files) {
  for (const std::string& part : OwnDcpParts(step, files)) {
    if (part == StrCat(kFsdpModel, "0/") || part == StrCat(kFsdpOptimizer, "0/")) continue;
    return Fail(ErrorCode::kUnsupported, StrCat("'", part, kSeveral));
  }
  if (!TraitsOf(step).engine) return {};
  for (const std::string& path : PathsOf(files)) {
    const size_t slash = path.find('/');
    if (slash != std::string::npos && path.starts_with(kNextEngine) && IsStates(path)) {
      return Fail(ErrorCode::kUnsupported, StrCat("'", path.substr(0, slash + 1), kSeveral));
    }
  }
  return {};
}

// A tool's name for what another tool saved: one text for all of them, so that it is said
// once.
Error NotItsOwn(const std::optional<ToolFiles>& files) {
  return {ErrorCode::kUnsupported, files ? StrCat("not saved by it, but by ", ToolName(files->tool))
                                         : std::string("not saved by a training tool")};
}

}  // namespace

std::vector<BlobIndex> FilesShownToTool(const StepModel& step) {
  std::vector<BlobIndex> shown;
  const auto files = ToolFilesOf(step);
  if (!files) return shown;
  const std::set<std::string> states = StateFolders(step, *files);
  for (const auto& [path, blob] : files->files) {
    if (IsShownAsItIs(path, states)) shown.push_back(blob);
  }
  return shown;
}

std::string_view ResumeFormat::name() const { return TopOf(tool_); }

Result<std::shared_ptr<const View>> ResumeFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  const StepModel& step = shown->step();
  const Layout layout = shown->layout();
  const auto files = ToolFilesOf(step);
  if (!files || files->tool != tool_) return Fail(NotItsOwn(files));
  const bool lightning = tool_ == StepTool::kLightning;
  const bool fsdp = TraitsOf(step).own_keys || layout.keys == StateKeys::kAccelerate;
  if (!TraitsOf(step).engine && !TraitsOf(step).own_keys) {
    CKPT_RETURN_IF_ERROR(CheckPlain(layout, ToolName(tool_)));
  }
  CKPT_RETURN_IF_ERROR(CheckOneModel(step, *files));
  Composer composer(shown, tool_, *files);
  if (fsdp) {
    if (TraitsOf(step).engine) CKPT_RETURN_IF_ERROR(composer.CheckSchedule());
    CKPT_RETURN_IF_ERROR(lightning ? composer.AddSharded() : composer.AddFsdp());
  }
  // Lightning's DeepSpeedStrategy asks the engine for what meta.pt has.
  const bool engine = TraitsOf(step).engine || !step.groups.empty();
  if (engine && !(fsdp && lightning)) CKPT_RETURN_IF_ERROR(composer.AddUniversal());
  if (TraitsOf(step).engine && !lightning) CKPT_RETURN_IF_ERROR(composer.AddPlain());
  return std::move(composer).Finish();
}

}  // namespace ckptfs
