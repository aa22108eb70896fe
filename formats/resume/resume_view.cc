// SPDX-License-Identifier: Apache-2.0

#include "formats/resume/resume_view.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/strings.h"
#include "core/io/root.h"
#include "core/view/shard.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/runs/tool_files.h"

namespace ckptfs {
namespace {

constexpr std::string_view kInner = "deepspeed";  // what the universal view calls itself
constexpr std::string_view kPointers[] = {"latest", "latest_universal"};

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

// A file of the source, or a text.
using Body = std::variant<BlobIndex, std::shared_ptr<const std::string>>;
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
  // `inner` (may be null) is shown as <top>/<tag>.
  ResumeView(std::shared_ptr<const StepModel> step, std::string_view top, ShownFiles files,
             std::string tag, std::shared_ptr<const View> inner)
      : step_(std::move(step)),
        top_(top),
        files_(std::move(files)),
        tag_(std::move(tag)),
        inner_(std::move(inner)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override;
  Result<ViewEntry> Find(std::string_view path) const override;
  Result<Plan> MakePlan(std::string_view file) const override;
  uint64_t MemoryBytes() const override;

 private:
  tl::unexpected<Error> NoSuch(std::string_view path) const {
    return Fail(ErrorCode::kNotFound, StrCat("no '", path, "' in what ", top_, " resumes from"));
  }
  // What stands behind "<top>/"; nothing for other paths.
  std::optional<std::string_view> BelowTop(std::string_view path) const;
  // The universal view's name of a path below the top; "" for what is not its.
  std::string InnerPath(std::string_view below) const;
  bool HasFolder(std::string_view folder) const;

  const std::shared_ptr<const StepModel> step_;
  const std::string top_;
  const ShownFiles files_;
  const std::string tag_;
  const std::shared_ptr<const View> inner_;
};

std::optional<std::string_view> ResumeView::BelowTop(std::string_view path) const {
  if (path == top_) return std::string_view();
  const bool below =
      path.starts_with(top_) && path.size() > top_.size() + 1 && path[top_.size()] == '/';
  return below ? std::optional(path.substr(top_.size() + 1)) : std::nullopt;
}

std::string ResumeView::InnerPath(std::string_view below) const {
  const bool inside =
      below.starts_with(tag_) && (below.size() == tag_.size() || below[tag_.size()] == '/');
  if (!inner_ || !inside) return "";
  return StrCat(kInner, "/", step_->id, below.substr(tag_.size()));
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
  if (const std::string inner = InnerPath(*below); !inner.empty()) return inner_->List(inner);
  const std::string folder = below->empty() ? "" : StrCat(*below, "/");
  if (!folder.empty() && !HasFolder(folder)) return NoSuch(directory);
  std::vector<ViewEntry> entries;
  if (folder.empty() && inner_) entries.push_back(FolderNamed(tag_));
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
  if (const std::string inner = InnerPath(*below); !inner.empty()) {
    CKPT_ASSIGN_OR_RETURN(ViewEntry entry, inner_->Find(inner));
    if (*below == tag_) entry.name = tag_;
    return entry;
  }
  if (const auto file = files_.find(*below); file != files_.end()) return file->second.entry;
  return HasFolder(StrCat(*below, "/")) ? Result<ViewEntry>(FolderNamed(LastComponent(*below)))
                                        : NoSuch(path);
}

Result<Plan> ResumeView::MakePlan(std::string_view path) const {
  const auto below = BelowTop(path);
  if (!below) return NoSuch(path);
  if (const std::string inner = InnerPath(*below); !inner.empty()) return inner_->MakePlan(inner);
  const auto file = files_.find(*below);
  if (file == files_.end()) return NoSuch(path);
  PlanBuilder plan;
  if (const auto* blob = std::get_if<BlobIndex>(&file->second.body)) {
    plan.BlobRange(*blob, 0, file->second.entry.size);
  } else {
    plan.Literal(std::get<std::shared_ptr<const std::string>>(file->second.body));
  }
  return std::move(plan).Finish();
}

uint64_t ResumeView::MemoryBytes() const {
  uint64_t bytes = sizeof(*this) + (inner_ ? inner_->MemoryBytes() : 0);
  for (const auto& [path, file] : files_) {
    bytes += sizeof(path) + path.capacity() + sizeof(file) + file.entry.name.capacity() +
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

// The path of the step's own tag below its own directory: where its states are read
// from, "" where they lie in that itself.
std::string OwnTag(const StepModel& step, const ToolFiles& files) {
  for (const auto& [path, blob] : files.files) {
    const bool states = path.ends_with("_states.pt") || path.ends_with("/zero/optimizer_state.pt");
    const size_t slash = path.find('/');
    if (IsOfDeepSpeed(step) && states && slash != std::string::npos)
      return path.substr(0, slash + 1);
  }
  return "";
}

// All that the tool wrote but the tag, in whose place the layout's is shown.
ShownFiles FilesAround(const StepModel& step, const ToolFiles& files) {
  const std::string tag = OwnTag(step, files);
  ShownFiles shown;
  for (const auto& [path, blob] : files.files) {
    const bool pointer =
        std::find(std::begin(kPointers), std::end(kPointers), path) != std::end(kPointers);
    if (pointer || (!tag.empty() && path.starts_with(tag))) continue;
    shown.emplace(path, SourceFile(step, path, blob));
  }
  return shown;
}

// A tool without DeepSpeed keeps whole tensors in one file: there is nothing to re-lay.
Status CheckPlain(const Layout& layout, std::string_view tool) {
  if (layout.dtype) {
    return Fail(ErrorCode::kUnsupported,
                StrCat(tool, " resumes with the dtype that it saved: leave it out of the layout"));
  }
  if (layout.tp == 1 && layout.pp == 1 && layout.ep == 1) return {};
  return Fail(ErrorCode::kUnsupported,
              StrCat(tool, " without DeepSpeed saved whole tensors for data parallelism alone"));
}

}  // namespace

std::string_view ResumeFormat::name() const { return TopOf(tool_); }

Result<std::shared_ptr<const View>> ResumeFormat::Open(std::shared_ptr<const StepModel> step,
                                                       const Layout& layout) const {
  CKPT_ASSIGN_OR_RETURN(const auto files, ToolFilesOf(*step));
  if (!files || files->tool != tool_) {
    return Fail(ErrorCode::kUnsupported, StrCat("not saved by ", ToolName(tool_)));
  }
  const std::string tag = TagOf(tool_, *step);
  ShownFiles shown = FilesAround(*step, *files);
  std::shared_ptr<const View> inner;
  const bool states = !step->groups.empty();
  if (IsOfDeepSpeed(*step) || states) {
    auto universal = deepspeed::UniversalFormat(families_).Open(step, layout);
    if (!universal && IsOfDeepSpeed(*step)) return Fail(std::move(universal).error());
    if (universal) inner = *std::move(universal);
  }
  if (!IsOfDeepSpeed(*step)) CKPT_RETURN_IF_ERROR(CheckPlain(layout, ToolName(tool_)));
  if (inner) {
    std::erase_if(shown, [&](const auto& file) { return file.first.starts_with(tag + "/"); });
    for (const std::string_view pointer : kPointers) {
      shown.insert_or_assign(std::string(pointer), TextFile(pointer, tag));
    }
  }
  return std::make_shared<const ResumeView>(std::move(step), name(), std::move(shown), tag,
                                            std::move(inner));
}

}  // namespace ckptfs
