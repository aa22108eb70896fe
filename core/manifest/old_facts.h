// SPDX-License-Identifier: Apache-2.0
//
// Builds before the table of facts kept them as documents, each a pickle that our own writer had
// printed:
//
//   "training_tool"      {"tool": text, "own": path below the root}
//   "model_files"        {name: text, or the index of a blob}
//   "made_config"        True
//   "safetensors_files"  {the index of a blob: the offset of its first tensor}
//   "group_numbers"      [number of each group, as the ranks' optimizers counted]
//   "dcp/keys"           {"model": prefix, "optimizers": [prefix ..], "flat": bool,
//                         "tensors": {key: (dtype, torch.Size)},
//                         "numbers": {label: {name: number}},
//                         "kinds": {kind: [key or index ..]}, "state_names": {name: name}}
//   "ckptfs.dcp"         {"model": key, "optimizers": {label: key}}, of a job's own save
//
// Here alone they become facts.  A document of such a name that is not of its form is the job's.
//
// Thread safety: pure functions.

#pragma once

#include "core/model/step_model.h"

namespace ckptfs {

// Moves facts out of the documents of a step whose manifest does not have the table.
void TakeOldFacts(StepModel& step);

// True if a document has a name of those above.
bool HasDocumentNamedAsFact(const StepModel& step);

}  // namespace ckptfs
