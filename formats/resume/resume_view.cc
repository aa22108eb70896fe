// SPDX-License-Identifier: Apache-2.0

#include "formats/resume/resume_view.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/strings.h"
#include "core/io/root.h"
#include "core/view/shard.h"
#include "formats/dcp/entries.h"
#include "formats/dcp/step_files.h"
#include "formats/dcp/view.h"
#include "formats/deepspeed/names.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/rank/rank_view.h"
#include "formats/resume/plain_optimizer.h"
#include "formats/tools/save_order.h"
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

bool IsOfDeepSpeed(const StepModel& step) { return step.framework.starts_with("deepspeed"); }
bool IsOfDcp(const StepModel& step) { return step.framework == "dcp"; }

// A directory or a file of another format that stands in this one.
struct Part {
  std::string shown;  // below the top; empty: what is in it stands there
  std::string inner;  // its name in `view`
  std::shared_ptr<const View> view;
};

// The file that PlainOptimizer makes of the step, when it is read.
struct MadeOptimizer {};
// A file of the source, a text, or that.
using Body = std::variant<BlobIndex, std::shared_ptr<const std::string>, MadeOptimizer>;
struct ShownFile {
  ViewEntry entry;
  Body body;
};
using ShownFiles = std::map<std::string, ShownFile, std::less<>>;  // by path below the top

ViewEntry FolderNamed(std::string_view name) {
  return {std::string(name), ViewEntry::Type::kDirectory, 0, "", Reading::kRandom};
}

class ResumeView : public View {
 public:
  ResumeView(std::shared_ptr<const StepModel> step, std::string_view top, ShownFiles files,
             std::vector<Part> parts, std::vector<std::string> left_out)
      : step_(std::move(step)),
        top_(top),
        files_(std::move(files)),
        parts_(std::move(parts)),
        left_out_(std::move(left_out)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  std::vector<std::string> LeftOut() const override;
  uint64_t MemoryBytes() const override;

 private:
  tl::unexpected<Error> NoSuch(std::string_view path) const {
    return Fail(ErrorCode::kNotFound, StrCat("no '", path,
                                             "' in the files "
                                             "that ",
                                             top_, " resumes from"));
  }
  // The path behind "<top>/"; nothing for other paths.
  std::optional<std::string_view> BelowTop(std::string_view path) const;
  // The part that a path below the top is in; null if in none.
  const Part* PartOf(std::string_view below) const;
  bool HasFolder(std::string_view folder) const;

  const std::shared_ptr<const StepModel> step_;
  const std::string top_;
  const ShownFiles files_;
  const std::vector<Part> parts_;
  const std::vector<std::string> left_out_;  // besides what its parts leave out
};

std::optional<std::string_view> ResumeView::BelowTop(std::string_view path) const {
  if (path == top_) return std::string_view();
  const bool below =
      path.starts_with(top_) && path.size() > top_.size() + 1 && path[top_.size()] == '/';
  return below ? std::optional(path.substr(top_.size() + 1)) : std::nullopt;
}

// The part's own name of a path that is in it.
std::string InnerPath(const Part& part, std::string_view below) {
  if (part.shown.empty()) return JoinPath(part.inner, std::string(below));
  return StrCat(part.inner, below.substr(part.shown.size()));
}

const Part* ResumeView::PartOf(std::string_view below) const {
  for (const Part& part : parts_) {
    if (part.shown.empty()) {
      if (!below.empty() && part.view->Find(InnerPath(part, below))) return &part;
      continue;
    }
    const size_t length = part.shown.size();
    const bool inside =
        below.starts_with(part.shown) && (below.size() == length || below[length] == '/');
    if (inside) return &part;
  }
  return nullptr;
}

// `folder` ends with '/'.
bool ResumeView::HasFolder(std::string_view folder) const {
  const auto behind = files_.lower_bound(folder);
  return behind != files_.end() && behind->first.starts_with(folder);
}

Result<std::vector<ViewEntry>> ResumeView::List(std::string_view directory) const {
  if (directory.empty()) return std::vector<ViewEntry>{FolderNamed(top_)};
  const auto below = BelowTop(directory);
  if (!below) return NoSuch(directory);
  if (const Part* part = PartOf(*below)) return part->view->List(InnerPath(*part, *below));
  const std::string folder = below->empty() ? "" : StrCat(*below, "/");
  if (!folder.empty() && !HasFolder(folder)) return NoSuch(directory);
  std::vector<ViewEntry> entries;
  for (const Part& part : parts_) {
    if (!folder.empty()) continue;
    if (part.shown.empty()) {
      CKPT_ASSIGN_OR_RETURN(const auto inside, part.view->List(part.inner));
      entries.insert(entries.end(), inside.begin(), inside.end());
      continue;
    }
    CKPT_ASSIGN_OR_RETURN(ViewEntry entry, part.view->Find(part.inner));
    entry.name = part.shown;
    entries.push_back(std::move(entry));
  }
  for (auto at = files_.lower_bound(folder); at != files_.end() && at->first.starts_with(folder);
       ++at) {
    const std::string_view rest = std::string_view(at->first).substr(folder.size());
    const size_t slash = rest.find('/');
    if (slash == std::string_view::npos) {
      entries.push_back(at->second.entry);
    } else if (entries.empty() || entries.back().name != rest.substr(0, slash)) {
      entries.push_back(FolderNamed(rest.substr(0, slash)));
    }
  }
  return entries;
}

Result<ViewEntry> ResumeView::Find(std::string_view path) const {
  const auto below = BelowTop(path);
  if (!below) return NoSuch(path);
  if (below->empty()) return FolderNamed(top_);
  if (const Part* part = PartOf(*below)) {
    CKPT_ASSIGN_OR_RETURN(ViewEntry entry, part->view->Find(InnerPath(*part, *below)));
    if (*below == part->shown) entry.name = part->shown;
    return entry;
  }
  if (const auto file = files_.find(*below); file != files_.end()) return file->second.entry;
  return HasFolder(StrCat(*below, "/")) ? Result<ViewEntry>(FolderNamed(LastComponent(*below)))
                                        : NoSuch(path);
}

Result<Plan> ResumeView::MakePlan(std::string_view path) const {
  const auto below = BelowTop(path);
  if (!below) return NoSuch(path);
  if (const Part* part = PartOf(*below)) return part->view->MakePlan(InnerPath(*part, *below));
  const auto file = files_.find(*below);
  if (file == files_.end()) return NoSuch(path);
  if (std::holds_alternative<MadeOptimizer>(file->second.body)) {
    CKPT_ASSIGN_OR_RETURN(ArchiveContent content, PlainOptimizer(*step_));
    return std::move(content).MakePlan(kArchive);
  }
  PlanBuilder plan;
  if (const auto* blob = std::get_if<BlobIndex>(&file->second.body)) {
    plan.BlobRange(*blob, 0, file->second.entry.size);
  } else {
    plan.Literal(std::get<std::shared_ptr<const std::string>>(file->second.body));
  }
  return std::move(plan).Finish();
}

std::vector<std::string> ResumeView::LeftOut() const {
  std::vector<std::string> lines = left_out_;
  for (const Part& part : parts_) {
    for (std::string& line : part.view->LeftOut()) lines.push_back(std::move(line));
  }
  return lines;
}

uint64_t ResumeView::MemoryBytes() const {
  uint64_t bytes = sizeof(*this);
  for (const std::string& line : left_out_) bytes += sizeof(line) + line.capacity();
  for (const Part& part : parts_) bytes += sizeof(part) + part.view->MemoryBytes();
  for (const auto& [path, file] : files_) {
    bytes += sizeof(std::string) + path.capacity() + sizeof(file) + file.entry.name.capacity() +
             4 * sizeof(void*);
  }
  return bytes;
}

ShownFile SourceFile(const StepModel& step, const std::string& path, BlobIndex blob) {
  const std::string name = LastComponent(path);
  return {{name, ViewEntry::Type::kFile, step.blob(blob).stamp.size, "", GuessReading(name)}, blob};
}

ShownFile TextFile(std::string_view name, const std::string& text) {
  return {{std::string(name), ViewEntry::Type::kFile, text.size(), "", Reading::kRandom},
          std::make_shared<const std::string>(text)};
}

// One of DeepSpeed's files of states, by its name: a job may have written others that end alike.
bool IsStates(std::string_view path) {
  if (path.ends_with("/zero/optimizer_state.pt")) return true;
  deepspeed::StepFiles found;
  return deepspeed::ClassifyFile(LastComponent(path), found) && found.IsDeepSpeed();
}

// The path of the step's own tag below its own directory: where its states are read
// from, "" where they lie in that itself.
std::string OwnTag(const StepModel& step, const ToolFiles& files) {
  for (const auto& [path, blob] : files.files) {
    const size_t slash = path.find('/');
    if (IsOfDeepSpeed(step) && slash != std::string::npos && IsStates(path)) {
      return path.substr(0, slash + 1);
    }
  }
  return "";
}

// The directories of DCP's that a step has, each with a '/' behind it.
std::set<std::string> OwnDcpParts(const StepModel& step, const ToolFiles& files) {
  std::set<std::string> parts;
  for (const auto& [path, blob] : files.files) {
    const size_t slash = path.find('/');
    if (!IsOfDcp(step) || slash == std::string::npos) continue;
    if (dcp::IsPartName(path.substr(0, slash))) parts.insert(path.substr(0, slash + 1));
  }
  return parts;
}

// All that the tool wrote but the states, in whose place the layout's are shown.
ShownFiles FilesAround(const StepModel& step, const ToolFiles& files, const std::string& tag) {
  std::set<std::string> states = OwnDcpParts(step, files);
  if (!tag.empty()) states.insert(tag);
  ShownFiles shown;
  for (const auto& [path, blob] : files.files) {
    const bool pointer =
        std::find(std::begin(kPointers), std::end(kPointers), path) != std::end(kPointers);
    const bool state = states.contains(path.substr(0, path.find('/') + 1));
    if (!pointer && !state) shown.emplace(path, SourceFile(step, path, blob));
  }
  return shown;
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

// Nothing of the source has a name that something of the layout is shown under.
void MakeRoom(std::string_view name, ShownFiles& shown) {
  const std::string below = StrCat(name, "/");
  std::erase_if(
      shown, [&](const auto& file) { return file.first == name || file.first.starts_with(below); });
}

void Show(std::string_view name, ShownFile file, ShownFiles& shown) {
  MakeRoom(name, shown);
  shown.emplace(name, std::move(file));
}

// The directory of an engine, and the pointers to it.
Status AddUniversal(const std::shared_ptr<const StepModel>& step, const Layout& layout,
                    const FamilySet* families, const std::string& tag, ShownFiles& shown,
                    std::vector<Part>& parts, std::vector<std::string>& left_out) {
  auto universal = deepspeed::UniversalFormat(families).Open(step, layout);
  // For another framework's step this is more than the tool saved.
  if (!universal && !IsOfDeepSpeed(*step)) {
    left_out.push_back(StrCat("DeepSpeed's directory: ", universal.error().message));
    return {};
  }
  if (!universal) return Fail(std::move(universal).error());
  parts.push_back({tag, StrCat(kUniversal, "/", step->id), *std::move(universal)});
  for (const std::string_view pointer : kPointers) Show(pointer, TextFile(pointer, tag), shown);
  return {};
}

// The one directory of Lightning's FSDPStrategy and ModelParallelStrategy, with the keys that the
// strategy saved: what is in it stands beside the tool's own file.
Status AddSharded(const std::shared_ptr<const StepModel>& step, const Layout& layout,
                  const FamilySet* families, ShownFiles& shown, std::vector<Part>& parts) {
  if (!IsOfDcp(*step) || layout.keys != StateKeys::kAsSource) {
    return Fail(ErrorCode::kUnsupported,
                "Lightning's strategies ask for keys of their own: leave nested, flat, titan, "
                "accelerate and numbered out of the layout");
  }
  if (!shown.contains(kLightningMeta)) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("the file ", kLightningMeta,
                       " is missing in the step's directory; "
                       "Lightning's "
                       "strategies write it beside DCP's files: dcp/ has the step for any mesh"));
  }
  CKPT_ASSIGN_OR_RETURN(const dcp::KeyShape keys, dcp::KeysFor(*step, layout));
  const std::string top(TopOf(StepTool::kLightning));
  CKPT_ASSIGN_OR_RETURN(auto view, OpenDcpPart(step, layout, families, keys, {top, ""}));
  std::erase_if(shown, [](const auto& file) { return dcp::IsFileName(LastComponent(file.first)); });
  parts.push_back({"", top, std::move(view)});
  return {};
}

// The two directories of an FSDP job: of the weights, and of the optimizer if there is one.
Status AddFsdp(const std::shared_ptr<const StepModel>& step, Layout layout,
               const FamilySet* families, StepTool tool, std::vector<Part>& parts,
               std::vector<std::string>& left_out) {
  if (layout.keys != StateKeys::kAsSource && layout.keys != StateKeys::kAccelerate) {
    return Fail(
        Error{ErrorCode::kUnsupported, StrCat(ToolName(tool), " asks for keys of its own")}.Needing(
            "leave nested, flat, titan and numbered out of the layout"));
  }
  layout.keys = StateKeys::kAccelerate;
  CKPT_ASSIGN_OR_RETURN(const dcp::KeyShape keys, dcp::KeysFor(*step, layout));
  const bool optimizer = !step->groups.empty();
  for (const bool states : {false, true}) {
    if (states && !optimizer) continue;
    const std::string name = StrCat(states ? kFsdpOptimizer : kFsdpModel, 0);
    CKPT_ASSIGN_OR_RETURN(auto view, OpenDcpPart(step, layout, families, keys,
                                                 {name, states ? keys.optimizer : keys.model}));
    parts.push_back({name, name, std::move(view)});
  }
  if (optimizer) {
    left_out.push_back(
        "the optimizer's states under FSDP1: accelerate 1.15 asks for those of a "
        "fresh "
        "optimizer, which has none; under FSDP2 it takes them");
  }
  return {};
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

// Trainer loads an optimizer where it finds a schedule beside it, and else says nothing.
Status CheckSchedule(StepTool tool, const ShownFiles& shown) {
  if (tool != StepTool::kTrainer || shown.contains("scheduler.pt")) return {};
  return Fail(ErrorCode::kUnsupported,
              "Trainer loads an optimizer only beside a scheduler.pt, but the engine had the "
              "schedule");
}

// The files that the tool would load of a DeepSpeed step if it went on without DeepSpeed:
// weights in the layout's dtype, and the optimizer, or why it is not there.
Status AddPlain(const std::shared_ptr<const StepModel>& step, const Layout& layout,
                const FamilySet* families, StepTool tool, const std::string& tag, ShownFiles& shown,
                std::vector<Part>& parts, std::vector<std::string>& left_out) {
  const std::string name = tool == StepTool::kTrainer ? "optimizer.pt" : "optimizer.bin";
  Status scheduled = CheckSchedule(tool, shown);
  auto optimizer = scheduled ? PlainOptimizer(*step)
                             : Result<ArchiveContent>(Fail(std::move(scheduled).error()));
  if (!optimizer) {
    const std::string why =
        StrCat("There is no ", name,
               " for a training without DeepSpeed: ", optimizer.error().message, "\n");
    Show(kWhyNot, TextFile(kWhyNot, why), shown);
    left_out.push_back(
        StrCat(name, " for a training without DeepSpeed: ", optimizer.error().message));
    return {};
  }
  CKPT_ASSIGN_OR_RETURN(const uint64_t size, optimizer->Size(kArchive));
  Show(name, {{name, ViewEntry::Type::kFile, size, "", Reading::kCopied}, MadeOptimizer{}}, shown);
  // If one directory has several tags, the weights are those of one.
  const bool one = tag.empty() || !step->id.ends_with(StrCat("-", tag.substr(0, tag.size() - 1)));
  const bool own = one && std::any_of(shown.begin(), shown.end(), [](const auto& file) {
                     return IsWeights(file.first) || file.first.starts_with("adapter_model.");
                   });
  if (own && !layout.dtype) return {};
  Layout whole;
  whole.dtype = layout.dtype;
  whole.naming = layout.naming;
  CKPT_ASSIGN_OR_RETURN(auto weights, RankFormat(families).Open(step, whole));
  std::erase_if(shown, [](const auto& file) { return IsWeights(file.first); });
  parts.push_back({std::string(kWeights), StrCat(kRank, kWeights), std::move(weights)});
  return {};
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
  if (!IsOfDeepSpeed(step)) return {};
  for (const auto& [path, blob] : files.files) {
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

std::string_view ResumeFormat::name() const { return TopOf(tool_); }

Result<std::shared_ptr<const View>> ResumeFormat::Open(std::shared_ptr<const StepModel> step,
                                                       const Layout& layout) const {
  CKPT_ASSIGN_OR_RETURN(const auto files, ToolFilesOf(*step));
  if (!files || files->tool != tool_) return Fail(NotItsOwn(files));
  const bool lightning = tool_ == StepTool::kLightning;
  const bool fsdp = IsOfDcp(*step) || layout.keys == StateKeys::kAccelerate;
  if (!IsOfDeepSpeed(*step) && !IsOfDcp(*step)) {
    CKPT_RETURN_IF_ERROR(CheckPlain(layout, ToolName(tool_)));
  }
  CKPT_RETURN_IF_ERROR(CheckOneModel(*step, *files));
  const std::string tag = OwnTag(*step, *files);
  ShownFiles shown = FilesAround(*step, *files, tag);
  std::vector<Part> parts;
  std::vector<std::string> left_out;
  if (fsdp) {
    if (IsOfDeepSpeed(*step)) CKPT_RETURN_IF_ERROR(CheckSchedule(tool_, shown));
    CKPT_RETURN_IF_ERROR(lightning ? AddSharded(step, layout, families_, shown, parts)
                                   : AddFsdp(step, layout, families_, tool_, parts, left_out));
  }
  // Lightning's DeepSpeedStrategy asks the engine for what meta.pt has.
  const bool engine = IsOfDeepSpeed(*step) || !step->groups.empty();
  if (engine && !(fsdp && lightning)) {
    CKPT_RETURN_IF_ERROR(
        AddUniversal(step, layout, families_, TagOf(tool_, *step), shown, parts, left_out));
  }
  if (IsOfDeepSpeed(*step) && !lightning) {
    CKPT_RETURN_IF_ERROR(AddPlain(step, layout, families_, tool_, tag, shown, parts, left_out));
  }
  for (const Part& part : parts) {
    if (!part.shown.empty()) MakeRoom(part.shown, shown);
  }
  return std::make_shared<const ResumeView>(std::move(step), name(), std::move(shown),
                                            std::move(parts), std::move(left_out));
}

}  // namespace ckptfs
