// SPDX-License-Identifier: Apache-2.0
//
// A step of Hugging Face's own files is shown in its own dtype as those files: what
// maps one maps the source, and nothing is filled.  The source says which may be
// shown so (StepFacts::safetensors), since only it has seen their headers; the view whether all
// that it shows lies in them, and nothing else.
//
// Thread safety: pure function.
// Lifetime: refers to the step by index.
// Units: bytes.

#pragma once

#include <cstddef>
#include <vector>

#include "core/model/step_model.h"
#include "formats/huggingface/shown_tensors.h"

namespace ckptfs::huggingface {

struct WholeFile {
  BlobIndex blob{};
  std::vector<size_t> tensors;  // into what is shown, by offset
};

// The files that hold the tensors and nothing else, by path; none if there is a tensor
// that is not in one of them as it is shown.
std::vector<WholeFile> WholeFilesOf(const StepModel& step, const std::vector<ShownTensor>& tensors);

}  // namespace ckptfs::huggingface
