// SPDX-License-Identifier: Apache-2.0
//
// A step carries all files of its own directory, so that they can be shown as they were:
// somebody's notes and logs, and ToolFiles, which a training tool wrote around it
// (schedulers, random states, counters of batches, scripts) and which are passed on to who
// resumes.  Nothing is read of them.
//
//   document "training_tool" = {"tool": text, "own": path below the root}
//
// Thread safety: pure but for listing and looking at files.

#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/result.h"
#include "core/ingest/assembler.h"
#include "core/ingest/source.h"
#include "formats/runs/step_tree.h"

namespace ckptfs {

inline constexpr std::string_view kToolDocument = "training_tool";

// Files of one step's own directory that are carried.
inline constexpr size_t kMaxToolFiles = 4096;

// Of Lightning a step may be one file; nothing lies around that.
//
// Adds the files in the step's own directory and in the folders in it, but for those of
// other steps, and the document if a tool wrote it.  If none did, what fewer may read than the
// step's own files is left out, since a step is seen by who may read all of it; so is what
// cannot be read.  A note says what (kNotShownNote).  BLOCKS: on looking at each.
// REQUIRES: all files that something is read of were added to the assembler.
Status CarryOwnFiles(Assembler& assembler, const StepCandidate& step);

struct ToolFiles {
  StepTool tool = StepTool::kNone;
  std::string own;                         // below the root of the step's files
  std::map<std::string, BlobIndex> files;  // by path below `own`; if that is a file, its name
};

// Nothing if no tool wrote the step.  kInvalid for a document of another form.
Result<std::optional<ToolFiles>> ToolFilesOf(const StepModel& step);

}  // namespace ckptfs
