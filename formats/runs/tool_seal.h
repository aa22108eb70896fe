// SPDX-License-Identifier: Apache-2.0
//
// ToolSeal and CheckSealed tell by what a training tool writes last whether the directory of a
// step is whole:
//
//   tool                  last                       known to be its by
//   transformers' Trainer trainer_state.json         checkpoint-N with training_args.bin
//   accelerate            random_states_<rank>.pkl,  pytorch_model/, a tag of DeepSpeed
//                         custom_checkpoint_<N>.pkl
//   either                                           FSDP's weights without an optimizer
//   Lightning, sharded    meta.pt                    a name as its ModelCheckpoint gives
//
// or else by the steps before it in the same run.  As written by
// transformers 5.23, accelerate 1.15 and Lightning 2.6.
//
// Thread safety: pure but for the root that they list.

#pragma once

#include <string>

#include "core/base/result.h"
#include "core/ingest/source.h"
#include "core/io/root.h"

namespace ckptfs {

// Of a step whose own directory is `own`, and whose newest entry is of step.mtime_ns.  kUnknown of
// other tools, of Lightning's, and while the tool's last file grows.
Result<Seal> ToolSeal(const StepCandidate& step, const std::string& own);

// The file that the tool of the step writes last, below the root; "" of other tools, and of Lightning's.
Result<std::string> ToolLastFile(const StepCandidate& step, const std::string& own);

// kInvalid where a tool writes a file after all others and has not written it into the step's own
// directory: the save was cut off, or goes on.  Success with options.weights_only, and of a step
// that is one file.
Status CheckSealed(const StepCandidate& step, const SourceOptions& options);

}  // namespace ckptfs
