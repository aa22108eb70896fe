// SPDX-License-Identifier: Apache-2.0
//
// CompactStep makes a step of a store the store's own: its tensors are gathered, each is written
// whole into one of some files of about equal size, with digests (compact_plan.h), and a manifest
// that points there takes the place of the step's at once.  The step stays the same one: its
// identity, its name, and all files of its views.  Then its source is not needed any more.
//
//   <store>/blobs/<digest>.partial-compact   while it is written; a later call goes on with it
//   <store>/blobs/<digest>                   once it is whole and durable
//
// A process that is killed at any point leaves the step as it was or as it will be, and what a
// later call goes on with, or Store::Collect removes.
//
// Thread safety: may be called concurrently, also by several processes: of one step the second
// call is refused.
// Units: bytes.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/adopt/compact_plan.h"
#include "core/base/result.h"
#include "core/base/work_list.h"
#include "core/blob/blob_reader.h"
#include "core/store/store.h"

namespace ckptfs {

struct CompactRequest {
  BlobReader::Options reading;
  ShownWhole shown_whole;
  uint64_t file_bytes = uint64_t{4} << 30;  // about, of a packed file
  bool incomplete = false;  // also a step that lacks parts of its source (StepModel::left_out)
  bool dry_run = false;     // nothing is written
  JobOptions job;
};

struct CompactReport {
  StepRecord record;  // as it is now
  bool done = false;  // false: nothing had to be written, or a dry run
  uint64_t tensors = 0;
  uint64_t packed_files = 0;
  uint64_t packed_bytes = 0;
  uint64_t kept_files = 0;  // copied as they are
  uint64_t kept_bytes = 0;
  uint64_t in_place = 0;  // files of the store that stay where they are
  uint64_t in_place_bytes = 0;
  uint64_t left_bytes = 0;                  // of source files that the step does not need any more
  uint64_t resumed_bytes = 0;               // found written from an earlier call
  std::string directory;                    // where the files are
  std::vector<std::string> only_in_source;  // files beside the step that it does not have
};

// Errors: kUnsupported for a step that is provisional, that lacks parts of its source, or whose
// tensors repeat bytes, and for a store that is not a directory; kExists while another call writes
// it; kExhausted if there is no space: then what was written is gone; kStale, kNotFound if the step
// was replaced or removed meanwhile, or a source file is another one; those of reading. BLOCKS:
// until all is written.
Result<CompactReport> CompactStep(Store& store, const StepRecord& record,
                                  const CompactRequest& request);

}  // namespace ckptfs
