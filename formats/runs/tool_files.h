// SPDX-License-Identifier: Apache-2.0
//
// ToolFiles are what a training tool wrote around a step: schedulers, random states,
// counters of batches, scripts.  Nothing is read of them; a step carries all files of
// its own directory, so that they can be shown as they were and be passed on to
// who resumes.
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
// other steps, and the document.  Nothing where no tool wrote it.  What cannot be read is
// left out with a note.  BLOCKS: on looking at each.
// REQUIRES: all files that something is read of were added to the assembler.
Status CarryToolFiles(Assembler& assembler, const StepCandidate& step);

struct ToolFiles {
  StepTool tool = StepTool::kNone;
  std::string own;                         // below the root of the step's files
  std::map<std::string, BlobIndex> files;  // by path below `own`; if that is a file, its name
};

// Nothing if no tool wrote the step.  kInvalid for a document of another form.
Result<std::optional<ToolFiles>> ToolFilesOf(const StepModel& step);

}  // namespace ckptfs
