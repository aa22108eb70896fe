// SPDX-License-Identifier: Apache-2.0
//
// WritePlans writes plans as files of a directory, and takes the digests of their chunks on the
// way.  The work is pieces of equal size over all files, so it is balanced whatever the files'
// sizes are; memory is one buffer a thread.  It goes on where an earlier call was killed: a
// journal in the directory names the pieces that are durable, with their digests.
//
//   <directory>/.journal   journal (text, below)
//   <directory>/PATH       a file; it has its size from the start, and holes until it is whole
//   journal = "ckptfs-pieces 1" LF
//             *( file-number SP piece-number *( SP chunk-digest ) SP check LF )
//   check   = the digest of the line before it
//
// Thread safety: one call per directory at a time (the journal is locked).
// Lifetime: everything given must outlive the call.
// Units: bytes.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/view/plan.h"

namespace ckptfs {

inline constexpr std::string_view kPiecesJournal = ".journal";

struct PlannedFile {
  std::string path;  // below the directory
  Plan plan;
};

struct WrittenPlans {
  std::vector<std::vector<Digest>> chunks;  // by file, of every kChunkBytes
  uint64_t bytes_resumed = 0;               // found durable from an earlier call
};

// Writes all files, durable but for the directories' own names.  Directories that files lie in are
// made, and all users may search them.  kExists if another call is writing there; kExhausted
// if there is no space for all of them, before the first is written where the filesystem tells.
// REQUIRES: the same directory never gets other files; it is there, and nobody else writes there.
// BLOCKS: until they are written.
Result<WrittenPlans> WritePlans(const std::string& directory, std::span<const PlannedFile> files,
                                const StepModel& model, BlobReader& blobs,
                                const JobOptions& options);

}  // namespace ckptfs
