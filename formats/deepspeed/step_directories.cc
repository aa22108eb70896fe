// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/step_directories.h"

#include <algorithm>
#include <set>

#include "core/base/strings.h"
#include "formats/directory.h"
#include "formats/deepspeed/names.h"

namespace ckptfs::deepspeed {
namespace {

std::string LastComponent(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

Result<StepCandidate> CandidateOf(const std::string& directory, const std::string& root) {
  StepCandidate out;
  out.directory = directory;
  out.root = root;
  out.id = LastComponent(directory);
  out.iteration = IterationOfTag(out.id);
  CKPT_ASSIGN_OR_RETURN(out.mtime_ns, NewestEntry(directory));
  return out;
}

// The part of a tag before its last '/', with it; "" for a plain name.
std::string FolderOf(const std::string& tag) { return tag.substr(0, tag.find_last_of('/') + 1); }

Result<std::vector<std::string>> Subdirectories(const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListNames(path));
  std::vector<std::string> out;
  for (const std::string& name : names) {
    CKPT_ASSIGN_OR_RETURN(const bool directory, IsDirectory(StrCat(path, "/", name)));
    if (directory) out.push_back(name);
  }
  return out;
}

// The tag that <path>/<pointer> names; kInvalid if there is no such directory.
Result<std::optional<std::string>> ReadTag(const std::string& path, std::string_view pointer) {
  const std::string file = StrCat(path, "/", pointer);
  CKPT_ASSIGN_OR_RETURN(auto tag, ReadPointer(file));
  if (!tag) return tag;
  CKPT_ASSIGN_OR_RETURN(const bool there, IsDirectory(StrCat(path, "/", *tag)));
  if (there) return tag;
  return Fail(ErrorCode::kInvalid,
              StrCat(file, ": names the tag '", *tag, "', and there is no such directory"));
}

StepCandidate PointerCandidate(const std::string& path, std::string_view pointer) {
  StepCandidate out;
  out.directory = StrCat(path, "/", pointer);
  out.root = path;
  out.id = pointer;
  return out;
}

// Of a Trainer's output the steps in its checkpoint-N/, whose save directories
// those are; the run is the output.
Status AddTrainerSteps(const std::string& path, std::string_view pointer, const IsStep& is_step,
                       std::vector<StepCandidate>& out) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> outer, Subdirectories(path));
  for (const std::string& checkpoint : outer) {
    if (!TrainerIteration(checkpoint)) continue;
    const std::string save = StrCat(path, "/", checkpoint);
    const auto latest = ReadTag(save, pointer);
    if (!latest && latest.error().code != ErrorCode::kInvalid) return Fail(latest.error());
    CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Subdirectories(save));
    for (const std::string& name : names) {
      const std::string directory = StrCat(save, "/", name);
      CKPT_ASSIGN_OR_RETURN(const bool step, is_step(directory));
      if (!step) continue;
      CKPT_ASSIGN_OR_RETURN(StepCandidate candidate, CandidateOf(directory, path));
      candidate.latest = latest && *latest == name;
      out.push_back(std::move(candidate));
    }
  }
  return {};
}

}  // namespace

Status CheckPointer(const StepCandidate& step) {
  CKPT_ASSIGN_OR_RETURN(const bool directory, IsDirectory(step.directory));
  if (directory) return {};
  CKPT_RETURN_IF_ERROR(ReadTag(step.root, step.id));
  return {};
}

Result<bool> HasUniversalStates(const std::string& directory) {
  return IsDirectory(StrCat(directory, "/zero"));
}

Result<std::vector<StepCandidate>> FindSteps(const std::string& path, std::string_view pointer,
                                             const IsStep& is_step) {
  std::vector<StepCandidate> out;
  CKPT_ASSIGN_OR_RETURN(const auto info, StatOf(path));
  if (!S_ISDIR(info->st_mode)) return out;
  CKPT_ASSIGN_OR_RETURN(const bool itself, is_step(path));
  if (itself) {
    const size_t slash = path.find_last_of('/');
    CKPT_ASSIGN_OR_RETURN(
        StepCandidate only,
        CandidateOf(path, slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash)));
    out.push_back(std::move(only));
    return out;
  }
  const auto latest = ReadTag(path, pointer);
  if (!latest && latest.error().code != ErrorCode::kInvalid) return Fail(latest.error());
  // A tag such as "epoch1/step5" lies in a folder of its own, and others beside it.
  std::set<std::string> folders{""};
  if (latest && *latest) folders.insert(FolderOf(**latest));
  for (const std::string& folder : folders) {
    std::string root = StrCat(path, "/", folder);
    root.pop_back();
    CKPT_ASSIGN_OR_RETURN(const std::vector<std::string> names, Subdirectories(root));
    for (const std::string& name : names) {
      const std::string directory = StrCat(root, "/", name);
      CKPT_ASSIGN_OR_RETURN(const bool step, is_step(directory));
      if (!step) continue;
      CKPT_ASSIGN_OR_RETURN(StepCandidate candidate, CandidateOf(directory, root));
      out.push_back(std::move(candidate));
      out.back().latest = latest && *latest == folder + name;
    }
  }
  CKPT_RETURN_IF_ERROR(AddTrainerSteps(path, pointer, is_step, out));
  if (!latest) out.push_back(PointerCandidate(path, pointer));
  return out;
}

}  // namespace ckptfs::deepspeed
