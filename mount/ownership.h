// SPDX-License-Identifier: Apache-2.0
//
// TakeOwnership puts a step's files into a store's own blob directory, so that
// the step survives a retention script that deletes its source.
//
//   <store>/blobs/<digest>/<tag>/...    the files, named as in the source
//
// The digest is of the files' names and stamps: the same step is taken once.
// The directory gets its name when it is whole and durable.  Files and
// directories keep owner and mode, those with an ACL their owner's bits of it.
//
// Thread safety: may be called concurrently, also by several processes.
// Units: bytes.

#pragma once

#include <string>

#include "core/base/result.h"
#include "core/ingest/source.h"
#include "core/model/step_model.h"

namespace ckptfs {

enum class Ownership {
  kReference,  // the files stay where they are
  kLink,       // reflinks, or hard links (they show changes, but survive deletion)
  kCopy,       // reflinks, or copies
};

// The directory in the store that holds what `step` holds; `model` was read from
// it.  kStale if a file changed meanwhile; kUnsupported if it cannot be linked
// (another filesystem).  BLOCKS: on copying.
Result<std::string> TakeOwnership(const std::string& store, const StepCandidate& step,
                                  const StepModel& model, Ownership ownership);

// A model that was read from such a directory, with the digests of all chunks.
// Copies are owned; a hard link is not, since whoever has its other name may write
// it: it keeps its stamp, but for the change time, which is not its own either
// (deleting the source changes it).
// BLOCKS: on reading every byte.
Result<StepModel> OwnedStep(StepModel model);

}  // namespace ckptfs
