// SPDX-License-Identifier: Apache-2.0
//
// FindReadBlobs tells the files that something is read of.  The step's other files are only shown
// as they are (logs, scripts, markers of an upload) and do not belong to its identity.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/model/step_model.h"

namespace ckptfs {

// By blob: 1 if bytes of atoms or of documents' tensors lie in it.
std::vector<uint8_t> FindReadBlobs(const StepModel& model);

// The identity of a step: all of it but what may change though the step does not, namely its
// side blob, files that nothing is read of, texts, owners, modes and change times.
struct StepIdentity {
  std::vector<Blob> blobs;
  std::vector<std::string> notes;  // but for those of such files
  int64_t mtime_ns = 0;
};

// Two steps of which this and all else is equal are the same.  It is a part and no model,
// since the atoms of a step may be half a gigabyte.  REQUIRES: no side blob.
StepIdentity IdentityOf(const StepModel& model);

}  // namespace ckptfs
