// SPDX-License-Identifier: Apache-2.0
//
// A step carries all files of its own directory, so that they can be shown as they were:
// somebody's notes and logs, and ToolFiles, which a training tool wrote around it
// (schedulers, random states, counters of batches, scripts) and which are passed on to the job
// that resumes.  Nothing is read of them.
//
// Thread safety: pure but for listing and looking at files.

#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/left_out.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"
#include "core/state/source.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {

// Files of one step's own directory that are carried.
inline constexpr size_t kMaxToolFiles = 4096;

// Folders there that are looked into.
inline constexpr size_t kMaxToolFolders = 4096;

// Returns the note on a file that fewer may read, and that the step is whole without.
LeftOut PrivateFile(std::string_view path);

// The users who may read the files that a step is read from.  A private note beside a step must
// hide the step from nobody, and the step must show nobody a file that he could not read.
class ReadersSoFar {
 public:
  explicit ReadersSoFar(const StepModel& files_so_far);
  // True if all of them may read a file, and search the directories that a link leads through.
  // Errors as Root::Open's.
  Result<bool> MayRead(const Root& root, const std::string& path) const;

 private:
  bool Pass(const OwnerAndMode& gate, uint32_t right) const;
  std::set<OwnerAndMode> readers_;
};

// A Lightning step may be one file; nothing lies around that.
//
// Adds the files in the step's own directory and in the folders in it, but for those of
// other steps, and says which tool wrote it.  Leaves out what cannot be read.  Also
// leaves out what fewer may read than the files that something is read of, unless the tool
// needs it to go on: only who may read all of a step sees it.  It says what it leaves out.
// REQUIRES: all files that something is read of were added to the assembler.
// BLOCKS: on looking at each.
Status CarryOwnFiles(Assembler& assembler, const StepCandidate& step);

struct ToolFiles {
  StepTool tool = StepTool::kNone;
  std::string own;                         // below the root of the step's files
  std::map<std::string, BlobIndex> files;  // by path below `own`; if that is a file, its name
  std::set<std::string> packed;            // ToolDirectory's
};

// Nothing if no tool that this build knows wrote the step.
std::optional<ToolFiles> ToolFilesOf(const StepModel& step);

}  // namespace ckptfs
