// SPDX-License-Identifier: Apache-2.0
//
// Checks that the files of a step are what was adopted, before a job reads them and after it: a
// job that reports numbers checks all files that its numbers speak of, read or not.
//
// Thread safety: may be called concurrently.

#pragma once

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"

namespace ckptfs {

// Compares stamps, and bytes where times moved (BlobReader::Check).  The first file that is
// another one is the error, with its name.  BLOCKS: on the system.
Status CheckFilesBefore(const StepModel& step, BlobReader& blobs);

// The same afterwards: a time that moved since is kStale.
Status CheckFilesAfter(const StepModel& step, BlobReader& blobs);

}  // namespace ckptfs
