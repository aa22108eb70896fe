// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/step_directories.h"

#include <algorithm>
#include <array>

#include "core/base/strings.h"
#include "core/model/step_notes.h"
#include "formats/deepspeed/names.h"
#include "formats/tools/directories.h"
#include "formats/tools/model_files.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_names.h"
#include "formats/tools/step_tree.h"
#include "formats/tools/tool_files.h"

namespace ckptfs::deepspeed {
namespace {

// The path of a tag below its save directory, as the pointer has it.
std::string TagOf(const std::string& directory, const std::string& save) {
  return directory.substr(save.empty() ? 0 : save.size() + 1);
}

// The name of a tag as a step's: "epoch1-step5" of "epoch1/step5".
std::string IdOfTag(std::string_view tag) {
  std::string out(tag);
  std::ranges::replace(out, '/', '-');
  return out;
}

// `save`: which holds the tag, or folders that it lies in.
Result<StepCandidate> CandidateOf(const std::shared_ptr<const Root>& root,
                                  const std::string& directory, const std::string& save) {
  CKPT_ASSIGN_OR_RETURN(StepCandidate out, StepAt(root, directory, save));
  if (ParentPath(directory) != save) out.id = IdOfTag(TagOf(directory, save));
  out.iteration = IterationOfTag(out.id);
  return out;
}

// How many folders below its save directory a tag lies in.
size_t DepthOf(std::string_view tag) { return static_cast<size_t>(std::ranges::count(tag, '/')); }

// The folders that the pointer in a directory says tags lie in; 0 where it says nothing.
Result<size_t> DepthOfTags(const Root& root, const std::string& directory,
                           std::string_view pointer) {
  const auto tag = ReadPointer(root, JoinPath(directory, pointer));
  if (tag) return *tag ? DepthOf(**tag) : size_t{0};
  if (tag.error().code != ErrorCode::kInvalid) return Fail(Error(tag.error()));
  return size_t{0};
}

// The save directory of the tags in a directory: that, or the one above it, if its pointer says
// that a job's tags lie in folders.
Result<std::string> SaveOfTagsIn(const Root& root, const std::string& directory,
                                 std::string_view pointer) {
  if (directory.empty()) return directory;
  CKPT_ASSIGN_OR_RETURN(const bool own, HasFile(root, JoinPath(directory, pointer)));
  if (own) return directory;
  const std::string above = ParentPath(directory);
  CKPT_ASSIGN_OR_RETURN(const size_t depth, DepthOfTags(root, above, pointer));
  return depth == 1 ? above : directory;
}

// The tag that <directory>/<pointer> names; kInvalid if there is no such directory.
Result<std::optional<std::string>> ReadTag(const Root& root, const std::string& directory,
                                           std::string_view pointer) {
  const std::string file = JoinPath(directory, pointer);
  CKPT_ASSIGN_OR_RETURN(auto tag, ReadPointer(root, file));
  if (!tag) return tag;
  CKPT_ASSIGN_OR_RETURN(const bool there, HasDirectory(root, JoinPath(directory, *tag)));
  if (there) return tag;
  return Fail(ErrorCode::kInvalid, StrCat(root.PathOf(file), ": names the tag '", *tag,
                                          "', but that directory does not exist"));
}

StepCandidate PointerCandidate(const std::shared_ptr<const Root>& root,
                               const std::string& directory, std::string_view pointer) {
  StepCandidate out;
  out.root = root;
  out.directory = JoinPath(directory, pointer);
  out.save = directory;
  out.id = pointer;
  out.pointer = true;
  return out;
}

// One that cannot be looked into, named like a step: Complete says why.
StepCandidate ClosedCandidate(const std::shared_ptr<const Root>& root, const std::string& directory,
                              const std::string& save) {
  StepCandidate out;
  out.root = root;
  out.directory = directory;
  out.save = save;
  out.id = IdOfTag(TagOf(directory, save));
  out.iteration = IterationOfTag(out.id);
  return out;
}

// The steps among the directories of `folder`, which lies in `save` or is it; `latest` names a tag
// below that.
Status AddSteps(const std::shared_ptr<const Root>& root, const std::string& folder,
                const std::string& save, const Result<std::optional<std::string>>& latest,
                const IsStep& is_step, std::vector<StepCandidate>& out) {
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, folder));
  for (const std::string& name : entries.directories) {
    const std::string tag = JoinPath(folder, name);
    const auto step = is_step(*root, tag);
    if (!step && !IsOutOfReach(step.error())) return Fail(Error(step.error()));
    if (!step && step.error().code == ErrorCode::kPermission && StepNumber(name)) {
      out.push_back(ClosedCandidate(root, tag, save));
    }
    if (!step || !*step) continue;
    CKPT_ASSIGN_OR_RETURN(StepCandidate candidate, CandidateOf(root, tag, save));
    candidate.latest = latest && *latest && tag == JoinPath(save, **latest);
    out.push_back(std::move(candidate));
  }
  return {};
}

// The folders in `folders` that hold tags or more folders, for a job whose tags are paths: neither
// steps nor save directories of others.
Result<std::vector<std::string>> FoldersIn(const Root& root,
                                           const std::vector<std::string>& folders,
                                           std::string_view pointer, const IsStep& is_step) {
  std::vector<std::string> out;
  for (const std::string& folder : folders) {
    const auto entries = ListStepEntries(root, folder);
    if (!entries && !IsOutOfReach(entries.error())) return Fail(Error(entries.error()));
    for (const std::string& name : entries ? entries->directories : std::vector<std::string>()) {
      std::string path = JoinPath(folder, name);
      const auto step = is_step(root, path);
      const auto own = HasFile(root, JoinPath(path, pointer));
      for (const auto* one : {&step, &own}) {
        if (!*one && !IsOutOfReach(one->error())) return Fail(Error(one->error()));
      }
      if (step && own && !*step && !*own) out.push_back(std::move(path));
    }
    if (out.size() > kMaxStepDirectories) {
      return Fail(ErrorCode::kUnsupported,
                  StrCat(root.PathOf(folder), ": more than ", kMaxStepDirectories, " folders"));
    }
  }
  return out;
}

// Scripts that DeepSpeed copies beside its tags; they run where `latest` lies.
constexpr std::array<std::string_view, 2> kScripts = {"zero_to_fp32.py", "zero_to_torch.py"};
constexpr uint64_t kMaxScript = 256 << 10;

// The suffix that ds_to_universal adds to the name of a step.
constexpr std::string_view kConverted = "_universal";

// The tags in a directory; none where it cannot be read, which is nothing of ours.
Result<std::vector<std::string>> TagsIn(const Root& root, const std::string& directory,
                                        const StepEntries& entries, const IsStep& is_step) {
  std::vector<std::string> tags;
  for (const std::string& name : entries.directories) {
    const auto step = is_step(root, JoinPath(directory, name));
    if (!step && !IsOutOfReach(step.error())) return Fail(Error(step.error()));
    if (step && *step) tags.push_back(name);
  }
  return tags;
}

// The steps that a training tool's directory holds, of a run in `save`.
Status AddToolSteps(const std::shared_ptr<const Root>& root, const std::string& own,
                    const std::string& save, const StepEntries& entries, const IsStep& is_step,
                    std::vector<StepCandidate>& out) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> tags, TagsIn(*root, own, entries, is_step));
  for (const std::string& tag : tags) {
    CKPT_ASSIGN_OR_RETURN(StepCandidate step, ToolStep(root, own));
    step.directory = JoinPath(own, tag);
    step.save = save;
    if (tags.size() > 1) step.id += StrCat("-", tag);
    const bool said = step.id.ends_with(kConverted);
    if (tag.ends_with(kConverted) && !said) step.id += kConverted;
    CKPT_ASSIGN_OR_RETURN(step.mtime_ns, NewestEntry(*root, step.directory));
    out.push_back(std::move(step));
  }
  return {};
}

// The directories in `run` that a training tool wrote around steps.
Status AddToolDirectories(const std::shared_ptr<const Root>& root, const std::string& run,
                          const IsStep& is_step, std::vector<StepCandidate>& out) {
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, run));
  for (const std::string& name : entries.directories) {
    const std::string own = JoinPath(run, name);
    const auto inside = ListStepEntries(*root, own);
    if (!inside && !IsOutOfReach(inside.error())) return Fail(Error(inside.error()));
    if (!inside || ToolOf(name, *inside) == StepTool::kNone) continue;
    CKPT_RETURN_IF_ERROR(AddToolSteps(root, own, run, *inside, is_step, out));
  }
  return {};
}

}  // namespace

Status CheckPointer(const StepCandidate& step) {
  CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(*step.root, step.directory));
  if (directory) return {};
  CKPT_RETURN_IF_ERROR(ReadTag(*step.root, step.save, step.id));
  return {};
}

namespace {

// A root that opens nothing but the file which was opened there: what is looked at is what is read,
// whatever has its name by then.
class OpenedRoot final : public Root {
 public:
  OpenedRoot(const Root& root, const Result<std::shared_ptr<const File>>& file)
      : Root(root.name(), root.local()), root_(root), file_(file) {}
  Result<std::vector<RootEntry>> List(std::string_view path) const override {
    return root_.List(path);
  }
  Result<EntryStat> Stat(std::string_view path) const override { return root_.Stat(path); }
  Result<std::shared_ptr<const File>> Open(std::string_view) const override { return file_; }
  std::string PathOf(std::string_view path) const override { return root_.PathOf(path); }

 private:
  const Root& root_;
  const Result<std::shared_ptr<const File>>& file_;
};

// Files that a training tool wrote beside several tags belong to the tag that the pointer names.
Status CarryTools(Assembler& assembler, const StepCandidate& step, std::string_view pointer) {
  const std::string tag = LastComponent(step.directory);
  if (!step.id.ends_with(StrCat("-", tag))) return CarryOwnFiles(assembler, step);
  const auto named = ReadTag(*step.root, step.Own(), pointer);
  if (named && *named == tag) return CarryOwnFiles(assembler, step);
  LeaveOut(assembler.header(),
           {LeftOutPart::kDocument,
            StrCat("the files that ", LastComponent(step.Own()), " has beside its tags"),
            StrCat("its ", pointer,
                   named && *named ? StrCat(" names ", **named) : " does not name one of them",
                   "; these files belong only to the tag that it names"),
            ""});
  StepCandidate alone = step;
  alone.own = step.directory;
  return CarryOwnFiles(assembler, alone);
}

}  // namespace

Status CarryBeside(Assembler& assembler, const StepCandidate& step, std::string_view pointer) {
  if (step.Own() != step.directory) return CarryTools(assembler, step, pointer);
  StepModel& header = assembler.header();
  CKPT_ASSIGN_OR_RETURN(const bool pointed, HasFile(*step.root, JoinPath(step.save, pointer)));
  if (pointed) {
    header.texts.push_back({std::string(pointer), TagOf(step.directory, step.save), 0});
  }
  const ReadersSoFar readers(header);
  for (const std::string_view name : kScripts) {
    const std::string script = JoinPath(step.save, name);
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*step.root, script));
    if (!there || there->kind != EntryKind::kFile) continue;
    const auto file = step.root->Open(script);
    const OpenedRoot opened(*step.root, file);
    auto readable = readers.MayRead(opened, script);
    auto text = readable ? ReadWhole(opened, script, kMaxScript) : Fail(readable.error());
    if (!text) {
      CKPT_RETURN_IF_ERROR(LeaveOut(std::move(text).error(), header));
    } else if (!*readable) {
      LeaveOut(header, PrivateFile(name));
    } else {
      header.texts.push_back({std::string(name), *std::move(text), there->access.mode & 0111});
    }
  }
  return CarryOwnFiles(assembler, step);
}

Result<bool> HasUniversalStates(const Root& root, const std::string& directory) {
  return HasDirectory(root, JoinPath(directory, "zero"));
}

Result<std::vector<StepCandidate>> FindSteps(const std::shared_ptr<const Root>& root,
                                             const std::string& directory, std::string_view pointer,
                                             const IsStep& is_step) {
  std::vector<StepCandidate> out;
  CKPT_ASSIGN_OR_RETURN(const bool file, HasFile(*root, directory));
  if (file) return out;
  CKPT_ASSIGN_OR_RETURN(const bool itself, is_step(*root, directory));
  if (itself) {
    CKPT_ASSIGN_OR_RETURN(const std::string save,
                          SaveOfTagsIn(*root, ParentPath(directory), pointer));
    CKPT_ASSIGN_OR_RETURN(StepCandidate only, CandidateOf(root, directory, save));
    out.push_back(std::move(only));
    return out;
  }
  const std::string name = LastComponent(root->PathOf(directory));
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*root, directory));
  if (ToolOf(name, entries) != StepTool::kNone) {
    CKPT_RETURN_IF_ERROR(
        AddToolSteps(root, directory, RunOfToolStep(directory, name), entries, is_step, out));
    if (!out.empty()) return out;
  }
  CKPT_ASSIGN_OR_RETURN(const std::string save, SaveOfTagsIn(*root, directory, pointer));
  const auto latest = ReadTag(*root, save, pointer);
  if (!latest && latest.error().code != ErrorCode::kInvalid) return Fail(latest.error());
  CKPT_RETURN_IF_ERROR(AddSteps(root, directory, save, latest, is_step, out));
  // Tags such as "epoch1/step5" lie in folders, of which the pointer names the newest.
  CKPT_ASSIGN_OR_RETURN(const size_t depth, DepthOfTags(*root, directory, pointer));
  std::vector<std::string> folders{directory};
  for (size_t i = 0; i < depth; ++i) {
    CKPT_ASSIGN_OR_RETURN(folders, FoldersIn(*root, folders, pointer, is_step));
    for (const std::string& folder : folders)
      CKPT_RETURN_IF_ERROR(AddSteps(root, folder, directory, latest, is_step, out));
  }
  CKPT_RETURN_IF_ERROR(AddToolDirectories(root, directory, is_step, out));
  if (!latest && save == directory) out.push_back(PointerCandidate(root, directory, pointer));
  return out;
}

Status CheckNoModelKey(const StepCandidate& step, const SourceOptions& options) {
  if (options.model.empty()) return {};
  return Fail(ErrorCode::kInvalid,
              StrCat("--model ", options.model, ": ", step.Path(),
                     " is DeepSpeed's, whose steps have one model without a key"));
}

}  // namespace ckptfs::deepspeed
