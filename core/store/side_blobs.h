// SPDX-License-Identifier: Apache-2.0
//
// Side blobs in a store (core/model/side_blob.h), named by their content:
//
//   blobs/side/<XXH3-128 of the bytes>.safetensors
//
// A step's record names its side blob.  One that no live step's record names is
// removed by SweepSideBlobs, unless somebody holds it: an adopt between writing
// it and publishing its step, a process that has a step of it loaded.  Holding
// is a shared flock, so it ends with the process.
//
// Thread safety: the functions may be called concurrently, also by several
// processes.
// Units: bytes.

#pragma once

#include <memory>
#include <string>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/root.h"
#include "core/model/step_model.h"
#include "core/store/store.h"
#include "core/store/store_index.h"

namespace ckptfs {

// Where a store's own blobs lie; empty for a storage that is not a directory.
std::string BlobsDirectory(const std::string& directory);

// "side/<digest>.safetensors", below `blobs`.
std::string SideBlobPath(const Digest& content);

// Store::PutSideBlob; `directory` is empty for a storage that is not one: nothing
// is then held.
Result<SideBlob> PutSideBlob(Storage& storage, const std::string& directory,
                             std::string_view bytes);

// A loaded model with its side blob where the store has it now, held until
// `hold` is gone; without it, and with a note that says so, where it is missing or
// not the one adopted (the pieces are still known).
struct ResolvedModel {
  StepModel model;
  std::shared_ptr<const void> hold;
};
ResolvedModel ResolveSideBlob(const std::string& directory, StepModel model);

// Removes the side blobs that no live step's record names and nobody holds.  If
// some record cannot be read, none.
Status SweepSideBlobs(Storage& storage, const std::string& directory, const KnownRecord& known);

}  // namespace ckptfs
