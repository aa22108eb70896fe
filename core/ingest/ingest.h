// SPDX-License-Identifier: Apache-2.0
//
// Ingest turns a path into indexed steps: it asks each source, reads every
// complete step in parallel and returns the models; publishing is the
// caller's.  All of a path's steps, or an error: never half a step.
//
// Thread safety: may be called concurrently.

#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/ingest/source.h"
#include "core/model/step_model.h"

namespace ckptfs {

struct IngestedStep {
  StepCandidate candidate;
  StepModel model;
};

struct IngestResult {
  std::vector<IngestedStep> steps;     // by (iteration, mtime)
  std::vector<std::string> skipped;    // "global_step7: incomplete: file ..." of a save directory
};

// kInvalid/kNotFound when no source knows the path: the message lists what was
// looked for.  A tag directory that is incomplete is an error; in a save
// directory incomplete tags are skipped and named, and malformed ones (a file
// that was cut off) unless the framework's own pointer names them.
Result<IngestResult> IngestPath(const std::string& path,
                                std::span<const std::unique_ptr<Source>> sources,
                                const SourceOptions& options);

}  // namespace ckptfs
