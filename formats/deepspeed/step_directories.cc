// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/step_directories.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "formats/deepspeed/names.h"
#include "formats/model_files/directories.h"

namespace ckptfs::deepspeed {
namespace {

Result<StepCandidate> CandidateOf(const std::shared_ptr<const Root>& root,
                                  const std::string& directory) {
  StepCandidate out;
  out.root = root;
  out.directory = directory;
  out.save = ParentPath(directory);
  out.id = LastComponent(directory);
  out.iteration = IterationOfTag(out.id);
  CKPT_ASSIGN_OR_RETURN(out.mtime_ns, NewestEntry(*root, directory));
  return out;
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
                                          "', and there is no such directory"));
}

StepCandidate PointerCandidate(const std::shared_ptr<const Root>& root,
                               const std::string& directory, std::string_view pointer) {
  StepCandidate out;
  out.root = root;
  out.directory = JoinPath(directory, pointer);
  out.save = directory;
  out.id = pointer;
  return out;
}

// The steps among the directories of `save`; `latest` names a tag below what
// `folder` leads to `save` from.
Status AddSteps(const std::shared_ptr<const Root>& root, const std::string& save,
                const std::string& folder, const Result<std::optional<std::string>>& latest,
                const IsStep& is_step, std::vector<StepCandidate>& out) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root->List(save));
  for (const RootEntry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory) continue;
    const std::string tag = JoinPath(save, entry.name);
    CKPT_ASSIGN_OR_RETURN(const bool step, is_step(*root, tag));
    if (!step) continue;
    CKPT_ASSIGN_OR_RETURN(StepCandidate candidate, CandidateOf(root, tag));
    candidate.latest = latest && *latest == JoinPath(folder, entry.name);
    out.push_back(std::move(candidate));
  }
  return {};
}

// Of a Trainer's output the steps in its checkpoint-N/, whose save directories
// those are; the run is the output.
Status AddTrainerSteps(const std::shared_ptr<const Root>& root, const std::string& output,
                       std::string_view pointer, const IsStep& is_step,
                       std::vector<StepCandidate>& out) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root->List(output));
  for (const RootEntry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory || !TrainerIteration(entry.name)) continue;
    const std::string save = JoinPath(output, entry.name);
    const auto latest = ReadTag(*root, save, pointer);
    if (!latest && latest.error().code != ErrorCode::kInvalid) return Fail(latest.error());
    const size_t before = out.size();
    CKPT_RETURN_IF_ERROR(AddSteps(root, save, "", latest, is_step, out));
    for (size_t i = before; i < out.size(); ++i) out[i].save = output;
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
    CKPT_ASSIGN_OR_RETURN(StepCandidate only, CandidateOf(root, directory));
    out.push_back(std::move(only));
    return out;
  }
  const auto latest = ReadTag(*root, directory, pointer);
  if (!latest && latest.error().code != ErrorCode::kInvalid) return Fail(latest.error());
  // A tag such as "epoch1/step5" lies in a folder of its own, and others beside it.
  std::set<std::string> folders{""};
  if (latest && *latest) folders.insert(ParentPath(**latest));
  for (const std::string& folder : folders) {
    CKPT_RETURN_IF_ERROR(AddSteps(root, JoinPath(directory, folder), folder, latest, is_step, out));
  }
  CKPT_RETURN_IF_ERROR(AddTrainerSteps(root, directory, pointer, is_step, out));
  if (!latest) out.push_back(PointerCandidate(root, directory, pointer));
  return out;
}

}  // namespace ckptfs::deepspeed
