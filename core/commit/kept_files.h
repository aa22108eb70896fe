// SPDX-License-Identifier: Apache-2.0
//
// KeptFiles is what proves the files of earlier saves that a step's rank files point into
// (core/state/rank_file.h, "kept"): each is a blob of a live step of the same run, with the
// size and chunk digests that this step's manifest says, and is held from before it is looked
// for, so that nobody reclaims it meanwhile.
//
// Thread safety: values; Hold may be called concurrently.
// Lifetime: the directories are held as long as one copy of the holds is there.

#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/store/store.h"

namespace ckptfs {

using BlobHolds = std::vector<std::shared_ptr<const void>>;

class KeptFiles {
 public:
  // Says a directory below the store ("blobs/snapshots/<digest>") to collectors that locks do
  // not reach; may be empty.
  using Say = std::function<Result<std::shared_ptr<const void>>(const std::string& directory)>;

  // Holds a model's blobs behind those of its `ranks` rank files.  kInvalid names one that
  // no live step of the run has.  BLOCKS: on loading manifests, the newest first.
  static Result<KeptFiles> Hold(Store& store, const std::string& run, const StepModel& model,
                                size_t ranks, const Say& say = {});

  const std::vector<Blob>& blobs() const { return blobs_; }  // in the model's order
  const BlobHolds& holds() const { return holds_; }

 private:
  std::vector<Blob> blobs_;
  BlobHolds holds_;
};

// `own`, and behind it what the store's blobs have: files of `own` come first.  Keeps `holds`.
std::shared_ptr<const Root> WithStoredFiles(std::shared_ptr<const Root> own, const Store& store,
                                            BlobHolds holds);

}  // namespace ckptfs
