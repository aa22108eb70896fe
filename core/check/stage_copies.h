// SPDX-License-Identifier: Apache-2.0
//
// Parameters that several pipeline stages hold under one name.  An engine keeps equal what it ties
// (the weight of an embedding and its head); what else such a module has (the head's bias) is each
// stage's own, and is trained where the stage's forward pass uses it.
//
// Thread safety: pure but for reading.

#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"

namespace ckptfs {

// Compares samples of the copies of each of these.  Where they differ, copies whose moments are all
// zeros were never trained and are dropped, if those that remain are equal.  Returns the names of
// parameters that lost copies.  kInvalid names one whose moments do not tell.
// BLOCKS: on reading the samples, and of copies that differ all moments.
Result<std::vector<std::string>> KeepTrainedCopies(StepModel& model,
                                                   std::span<const ParameterIndex> on_several,
                                                   BlobReader& blobs);

}  // namespace ckptfs
