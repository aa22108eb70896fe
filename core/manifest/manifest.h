// SPDX-License-Identifier: Apache-2.0
//
// A step's manifest file as text of a model and back (docs/reference/store-format.md).
//
// Thread safety: pure functions.
// Lifetime: a model owns what it says; the bytes may go.

#pragma once

#include <string>
#include <string_view>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/model/step_model.h"

namespace ckptfs {

// The step of a manifest file's bytes; every index and extent is checked.  Roots
// in the store's blob directory `blobs` are written relative to it, so that they
// are found where the store is now.
Result<StepModel> ParseManifest(std::string_view bytes, std::string_view blobs = {});
Result<std::string> RenderManifest(const StepModel& model, std::string_view blobs = {});
// The digest of the step's identity (core/model/read_blobs.h), rendered likewise.
Result<Digest> IdentityDigest(const StepModel& model, std::string_view blobs = {});

}  // namespace ckptfs
