// SPDX-License-Identifier: Apache-2.0
//
// A CompactPlan says how a step will lie in the store once it is compacted:
//
//   packed   atoms that ranks hold in parts, or of which there are copies: each whole, in its own
//            dtype, in one of some safetensors files of about equal size
//   kept     files that hold nothing but whole tensors, that a view shows as they are, or that
//            nothing is read of: the same bytes under the same path
//   in place files of the store's own that would be kept
//
// All that is not said here stays as it is: names, shapes, groups, documents.  An atom's values
// are what ReadAtom makes of them in the atom's own dtype, through which every view reads them.
// Where a rank held a multiple of its part (Piece::scale), its bytes are packed as they are.
//
//   <directory>/packed/00000.safetensors   keys "<kind>/<name>"
//   <directory>/root<N>/PATH               kept files of the step's N-th root
//
// Thread safety: pure functions over the model and what is in its files' inodes.
// Units: bytes.

#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/adopt/plan_files.h"
#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/io/file.h"
#include "core/model/step_model.h"

namespace ckptfs {

// By blob of a step: 1 if a view shows the file as it is.  Only formats know it.
using ShownWhole = std::function<std::vector<uint8_t>(const StepModel&)>;

struct CompactPlan {
  // As it will be.  Blobs that are in `files` have neither digests nor fingerprints yet; their
  // roots are below the empty path, and SetDirectory gives them theirs.
  StepModel model;
  std::vector<PlannedFile> files;    // plans of the model before
  std::vector<uint32_t> blobs;       // of `model`, by file
  std::vector<OwnerAndMode> access;  // likewise
  uint64_t tensors = 0;              // packed
  uint64_t packed_files = 0;         // the first of `files`
  uint64_t packed_bytes = 0;
  uint64_t kept_bytes = 0;  // of the other files
  uint64_t in_place = 0;    // files of the store that stay where they are
  uint64_t in_place_bytes = 0;
  uint64_t left_bytes = 0;        // of files that are not needed any more
  std::vector<std::string> lost;  // files beside the step that changed and are not taken
  // The directories on the way to the files, for the store's kept gates; none: only the files'
  // owner may see them.
  std::optional<std::vector<OwnerAndMode>> gates;

  bool IsNothing() const { return files.empty(); }
  void SetDirectory(const std::string& directory);
};

// `step` lies at `source`.  `file_bytes`: about so many in a packed file.
// kStale if a file that is needed changed.  BLOCKS: on looking at each file.
Result<CompactPlan> PlanCompact(const StepModel& step, const std::string& source, BlobReader& blobs,
                                const ShownWhole& shown_whole, uint64_t file_bytes);

}  // namespace ckptfs
