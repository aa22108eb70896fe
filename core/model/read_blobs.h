// SPDX-License-Identifier: Apache-2.0
//
// Of a step's files some are shown as they are and nothing else: logs, scripts,
// markers of an upload.  They are not a part of what the step is.
//
// Thread safety: pure functions.

#pragma once

#include <cstdint>
#include <vector>

#include "core/model/step_model.h"

namespace ckptfs {

// By blob: 1 if bytes of atoms or of documents' tensors lie in it.
std::vector<uint8_t> FindReadBlobs(const StepModel& model);

// The step without what may change though the step does not: its side blob,
// files that nothing is read of, owners, modes and change times.  Two steps of
// which this is equal are the same.
StepModel IdentityOf(StepModel model);

}  // namespace ckptfs
