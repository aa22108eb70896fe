// SPDX-License-Identifier: Apache-2.0
//
// The checks of a manifest beyond its schema: paths stay inside their root,
// extents inside their blobs, indices inside their tables, and derived atoms
// rest on others without going in circles.
//
// Thread safety: pure functions.
// Units: offsets are bytes, shapes elements.

#pragma once

#include <span>
#include <string_view>

#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// Relative, not empty, no "." or ".." component, no NUL.
Status CheckBlobPath(std::string_view path);

// A blob that is told by its size alone is the store's own and has digests, and
// digests are as many as its chunks.
Status CheckIdentity(const Blob& blob, bool root_is_store);

// Every fragment of the series lies in its local tensor and its blob.
Status CheckSeries(const FragmentSeries& series, std::span<const LocalTensor> locals,
                   std::span<const Blob> blobs);

Status CheckStoredTensor(const StoredTensor& tensor, const StepModel& model);

// Files are named by paths of at most one folder, rising, and are blobs of the step; a state's path
// is its kind; and a tensor that is a hyper-parameter has one element.
Status CheckFacts(const StepFacts& facts, std::span<const Blob> blobs);

// Each atom's source has what its kind needs, and casts end at stored bytes.
Status CheckAtomSources(const StepModel& model);

}  // namespace ckptfs
