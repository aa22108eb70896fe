// SPDX-License-Identifier: Apache-2.0
//
// Documents that several scopes (ranks) have under one name, and which of them are equal.
//
// Thread safety: pure apart from the blob reader.
// Units: bytes, of a document's pickle as the manifest has it and of the tensors that it mentions.

#pragma once

#include "core/base/result.h"
#include "core/blob/blob_reader.h"
#include "core/model/step_model.h"
#include "core/redundancy/redundancy.h"

namespace ckptfs {

// The class of all documents.  A key counts as one tensor: full if all its scopes have equal
// documents.  BLOCKS: on reading the documents' tensors.
Result<ClassRedundancy> CompareDocuments(const StepModel& step, BlobReader& blobs);

}  // namespace ckptfs
