// SPDX-License-Identifier: Apache-2.0
//
// These functions ask the filesystem whether a step's files are still being written: by a save, or
// by a program that copies them and has given them their sizes before their bytes.  Only files
// count that are read, or that are named like saved files.
//
// Thread safety: may be called concurrently.

#pragma once

#include <map>
#include <string>

#include "core/adopt/scan.h"
#include "core/base/result.h"
#include "core/io/file_stamp.h"
#include "core/io/root.h"
#include "core/model/step_model.h"
#include "core/state/source.h"
#include "core/state/tool_names.h"

namespace ckptfs {

// kStale, naming a file that a process of this machine has open for writing.  Files that are not
// on this machine, or gone, tell nothing.  BLOCKS: on opening each.
Status CheckNoWriter(const StepModel& model, const ToolNames& names);
// The same of files below a root, as far as their names are of what is saved.
Status CheckNoWriter(const Root& root, const std::map<std::string, FileStamp>& files,
                     const ToolNames& names);

// "FILE: 1048576 of its 2097152 bytes were never written (and 3 more files)"; "" if nothing tells.
// BLOCKS: as BytesNeverWritten, on each.
std::string NeverWritten(const StepModel& model, const ToolNames& names);

// Returns "FILE: written anew after LAST, ..." where files of two saves lie in the step: LAST,
// which its tool writes after FILE, is that of the save before (SaveState::last and
// SaveState::after). Notes it at the model, for `info`.  "" if nothing tells. BLOCKS: on opening
// each file.
std::string NoteWrittenAnew(IngestedStep& step, const SourceOptions& options,
                            const ToolNames& names);

}  // namespace ckptfs
