// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/tool_files.h"

#include <algorithm>
#include <array>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "core/access/access_rule.h"
#include "core/access/searched_directories.h"
#include "core/base/strings.h"
#include "core/model/step_notes.h"
#include "formats/tools/one_save.h"
#include "formats/tools/save_order.h"
#include "formats/tools/step_names.h"

namespace ckptfs {
namespace {

constexpr int kDeepest = 4;  // folders in folders
constexpr size_t kMaxToolNotes = 1000;
constexpr uint32_t kRead = 04;
constexpr uint32_t kSearch = 01;

constexpr std::array<std::pair<StepTool, std::string_view>, 3> kTools = {
    std::pair(StepTool::kTrainer, "trainer"), std::pair(StepTool::kAccelerate, "accelerate"),
    std::pair(StepTool::kLightning, "lightning")};

// How the names of files begin that a tool reads when it goes on from its step.  None of them is
// left out, however few may read it: the training would go on as if there were none.
constexpr std::array<std::pair<StepTool, std::string_view>, 15> kResumed = {
    std::pair(StepTool::kTrainer, "trainer_state.json"),
    std::pair(StepTool::kTrainer, "optimizer"),
    std::pair(StepTool::kTrainer, "scheduler"),
    std::pair(StepTool::kTrainer, "rng_state"),
    std::pair(StepTool::kTrainer, "scaler"),
    std::pair(StepTool::kTrainer, "latest"),
    std::pair(StepTool::kAccelerate, "random_states_"),
    std::pair(StepTool::kAccelerate, "optimizer"),
    std::pair(StepTool::kAccelerate, "scheduler"),
    std::pair(StepTool::kAccelerate, "scaler"),
    std::pair(StepTool::kAccelerate, "sampler"),
    std::pair(StepTool::kAccelerate, "dl_state_dict"),
    std::pair(StepTool::kAccelerate, "custom_checkpoint_"),
    std::pair(StepTool::kAccelerate, "latest"),
    std::pair(StepTool::kLightning, "")};

bool IsResumed(StepTool tool, std::string_view name) {
  return std::ranges::any_of(
      kResumed, [&](const auto& row) { return row.first == tool && name.starts_with(row.second); });
}

// The entries of the step's own directory, below which `path` lies.
struct Walk {
  Assembler& assembler;
  const StepCandidate& step;
  uint32_t root = 0;
  StepTool tool = StepTool::kNone;
  ReadersSoFar readers;
  std::set<std::string, std::less<>> folders =
      {};  // below the root: those that something is read in
  size_t files = 0;
  size_t looked_into = 0;  // folders
  size_t notes = 0;        // also those that are too many
};

// A path as it stands below the save directory.
std::string Shown(const StepCandidate& step, const std::string& path) {
  return path.substr(step.save.empty() ? 0 : step.save.size() + 1);
}

// A folder of another step: one in a Trainer's output that is a model itself.
bool IsAnothers(const Walk& walk, std::string_view name, const std::string& path) {
  // A folder that is called by a number alone is one of the step's own.
  return StepNumber(name) && !IsDigit(name.front()) && path != walk.step.directory;
}

void Note(Walk& walk, std::string_view why) {
  if (walk.notes++ < kMaxToolNotes)
    walk.assembler.header().notes.push_back(StrCat(kNotShownNote, why));
}

void LeaveOutFolder(Walk& walk, const std::string& path, std::string_view why) {
  Note(walk, StrCat("the folder '", Shown(walk.step, path), "', ", why));
}

// Nothing is read of it: what is not a file, is closed, goes or is cut meanwhile leaves the
// step whole.  A device that fails does not.
Status LeaveOutFile(Walk& walk, Error why) {
  constexpr std::array kOfTheFile = {ErrorCode::kInvalid,    ErrorCode::kNotFound,
                                     ErrorCode::kPermission, ErrorCode::kUnsupported,
                                     ErrorCode::kStale,      ErrorCode::kDataLoss};
  if (std::ranges::find(kOfTheFile, why.code) == kOfTheFile.end()) return Fail(std::move(why));
  Note(walk, why.message);
  return {};
}

Status CarryFile(Walk& walk, const std::string& path) {
  if (!IsResumed(walk.tool, LastComponent(path))) {
    auto readable = walk.readers.MayRead(*walk.step.root, path);
    if (!readable) return LeaveOutFile(walk, std::move(readable).error());
    if (!*readable) {
      LeaveOut(walk.assembler.header(), PrivateFile(Shown(walk.step, path)));
      return {};
    }
  }
  auto added = walk.assembler.AddFile(walk.root, Shown(walk.step, path));
  return added ? Status() : LeaveOutFile(walk, std::move(added).error());
}

Result<OwnerAndMode> AccessOf(const Root& root, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const EntryStat found, root.Stat(path));
  if (!root.local()) return found.access;
  CKPT_ASSIGN_OR_RETURN(const auto with_acl, AccessOfDirectory(root.PathOf(path)));
  return with_acl.value_or(found.access);
}

// A folder that holds nothing of the step, and that fewer may search than the step's own.  A
// tool's are the step's.
Result<bool> IsClosed(const Walk& walk, const std::string& path) {
  if (walk.tool != StepTool::kNone) return false;
  const auto folder = AccessOf(*walk.step.root, path);
  const auto own = AccessOf(*walk.step.root, walk.step.Own());
  for (const auto* one : {&folder, &own}) {
    if (!*one && one->error().code == ErrorCode::kNotFound) return true;
    if (!*one) return Fail(one->error());
  }
  return !LetsAllOf(*own, kSearch, *folder, kSearch);
}

// Where the sources of the step's kind read.
void LookAtFilesSoFar(Walk& walk) {
  for (const Blob& blob : walk.assembler.header().blobs) {
    if (blob.root != walk.root) continue;
    for (std::string folder = ParentPath(blob.path); !folder.empty(); folder = ParentPath(folder)) {
      if (!walk.folders.insert(folder).second) break;
    }
  }
}

// The files of one directory; the folders in it, to be looked into.
Result<std::vector<std::string>> CarryDirectory(Walk& walk, const std::string& directory) {
  std::vector<std::string> folders;
  if (++walk.looked_into > kMaxToolFolders) {
    if (walk.looked_into == kMaxToolFolders + 1) {
      Note(walk, StrCat("the content of folders around the step beyond the "
                        "first ",
                        kMaxToolFolders));
    }
    return folders;
  }
  auto entries = ListStepEntries(*walk.step.root, directory);
  if (!entries) {
    CKPT_RETURN_IF_ERROR(LeaveOutFile(walk, std::move(entries).error()));
    return folders;
  }
  for (const std::string& name : entries->files) {
    const std::string path = JoinPath(directory, name);
    if (walk.assembler.HasFile(walk.root, Shown(walk.step, path))) continue;
    if (++walk.files > kMaxToolFiles) {
      Note(walk, StrCat("files around the step beyond the first ", kMaxToolFiles));
      return std::vector<std::string>();
    }
    CKPT_RETURN_IF_ERROR(CarryFile(walk, path));
  }
  for (const std::string& name : entries->directories) {
    std::string path = JoinPath(directory, name);
    if (IsAnothers(walk, name, path)) {
      if (walk.step.Own() != walk.step.save)
        LeaveOutFolder(walk, path,
                       "which is named as a step "
                       "of its own");
    } else if (walk.folders.contains(Shown(walk.step, path))) {
      folders.push_back(std::move(path));
    } else if (entries->links.contains(name)) {  // it may lead anywhere, and round and round
      LeaveOutFolder(walk, path, "which is a symbolic link");
    } else {
      CKPT_ASSIGN_OR_RETURN(const bool closed, IsClosed(walk, path));
      if (closed)
        LeaveOutFolder(walk, path,
                       "which some users who may read the step may not "
                       "search");
      if (!closed) folders.push_back(std::move(path));
    }
  }
  return folders;
}

ToolDirectory DirectoryOf(StepTool tool, std::string own) {
  const auto known = std::ranges::find(kTools, tool, &std::pair<StepTool, std::string_view>::first);
  return {std::string(known->second), std::move(own)};
}

}  // namespace

ReadersSoFar::ReadersSoFar(const StepModel& files_so_far) {
  for (const Blob& blob : files_so_far.blobs) readers_.insert({blob.mode, blob.uid, blob.gid});
}

bool ReadersSoFar::Pass(const OwnerAndMode& gate, uint32_t right) const {
  return LetsEverybody(gate, right) ||
         std::ranges::any_of(readers_, [&](const OwnerAndMode& known) {
           return LetsAllOf(known, kRead, gate, right);
         });
}

Result<bool> ReadersSoFar::MayRead(const Root& root, const std::string& path) const {
  CKPT_ASSIGN_OR_RETURN(const auto file, root.Open(path));
  CKPT_ASSIGN_OR_RETURN(const FileIdentity identity, file->Identity());
  CKPT_ASSIGN_OR_RETURN(const EntryStat place, root.Stat(path));
  return Pass(identity.access, kRead) &&
         std::ranges::all_of(place.searched, [&](const OwnerAndMode& directory) {
           return Pass(directory, kSearch);
         });
}

LeftOut PrivateFile(std::string_view path) {
  return {LeftOutPart::kDocument, StrCat("'", path, "'"),
          "some users who may read the step's files may not read this one",
          "`chmod a+r` it, and adopt again with --refresh"};
}

Status CarryOwnFiles(Assembler& assembler, const StepCandidate& step) {
  const std::string& own = step.Own();
  CKPT_ASSIGN_OR_RETURN(const bool directory, HasDirectory(*step.root, own));
  if (!directory) {  // one file
    if (!IsLightningName(LastComponent(own))) return {};
    assembler.header().facts.tool = DirectoryOf(StepTool::kLightning, Shown(step, own));
    return {};
  }
  CKPT_ASSIGN_OR_RETURN(const StepEntries entries, ListStepEntries(*step.root, own));
  const StepTool tool = ToolOf(LastComponent(step.root->PathOf(own)), entries);
  CKPT_RETURN_IF_ERROR(CheckOneSave(*step.root, step.Own(), tool, entries));
  Walk walk{assembler, step, assembler.AddRoot(RootBelow(step.root, step.save)), tool,
            ReadersSoFar(assembler.header())};
  LookAtFilesSoFar(walk);
  std::vector<std::string> folders{own};
  // Folders of a save directory are a run's, with whatever lies in them.
  const int deepest = own == step.save ? 1 : kDeepest;
  for (int depth = 0; depth < deepest && !folders.empty(); ++depth) {
    std::vector<std::string> deeper;
    for (const std::string& folder : folders) {
      CKPT_ASSIGN_OR_RETURN(const auto inside, CarryDirectory(walk, folder));
      deeper.insert(deeper.end(), inside.begin(), inside.end());
    }
    folders = std::move(deeper);
  }
  if (own != step.save && !folders.empty())
    LeaveOutFolder(walk, folders[0],
                   "and all others as "
                   "deep");
  if (walk.notes > kMaxToolNotes) {
    assembler.header().notes.push_back(
        StrCat(kNotShownNote, "and ", walk.notes - kMaxToolNotes, " more files and folders"));
  }
  if (walk.tool == StepTool::kNone) return {};
  assembler.header().facts.tool =
      DirectoryOf(tool, own == step.save ? std::string() : Shown(step, own));
  return {};
}

std::optional<ToolFiles> ToolFilesOf(const StepModel& step) {
  if (!step.facts.tool) return std::nullopt;
  const auto known = std::ranges::find(kTools, step.facts.tool->tool,
                                       &std::pair<StepTool, std::string_view>::second);
  if (known == kTools.end()) return std::nullopt;  // a newer build knows it
  const ToolDirectory& tool = *step.facts.tool;
  return ToolFiles{known->first, tool.own, FilesOf(tool, step.blobs), tool.packed};
}

}  // namespace ckptfs
