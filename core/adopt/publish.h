// SPDX-License-Identifier: Apache-2.0
//
// PublishStep makes an indexed model a step of a store, with its small pieces
// packed into a side blob.  A step that is there already, packed or not, is left as it
// is.  The step appears with its side blob, or without one if the store has no
// room for it, or not at all; a process killed on the way leaves at most a side
// blob that Store::Collect removes.
//
// Thread safety: may be called concurrently, also by several processes.

#pragma once

#include <optional>
#include <string>

#include "core/adopt/pack.h"
#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/store/lives.h"
#include "core/store/store.h"

namespace ckptfs {

struct PublishRequest {
  std::string run;
  std::string source;    // absolute path it was adopted from
  std::string root;      // absolute save directory
  OpenRoots open_roots;  // of the model's, those that are not directories of this machine
  PublishHow how;        // but for `life`, which follows from the run's steps and from these:
  std::optional<NewSave::Named> named;  // NewSave
  bool arrived = false;
  uint32_t version = 0;
  int64_t oldest_ns = 0;
  bool pack = true;
  bool check = true;  // a sample of the weights (weight_check.h) of a new step
  PackOptions packing;
};

struct PublishOutcome {
  StepRecord record;
  LifeChoice life;            // of a step that was not there; else nothing
  std::string warning;        // why it is not packed though it could be; empty: it is
  uint64_t packed_atoms = 0;  // by this call
  uint64_t packed_pieces = 0;
};

// Errors: those of CheckWeightSample, PackSmallPieces and Store::Publish; the store's own but for
// kExhausted while the side blob is written, which becomes the warning.
// BLOCKS: on reading the pieces and on the store.
Result<PublishOutcome> PublishStep(Store& store, StepModel model, const PublishRequest& request);

}  // namespace ckptfs
