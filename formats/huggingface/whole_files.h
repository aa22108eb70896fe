// SPDX-License-Identifier: Apache-2.0
//
// A step of Hugging Face's own files is shown in its own dtype as those files: what
// maps one maps the source, and nothing is filled.  The source says which may be
// shown so, since only it has seen their headers; the view whether all that it shows
// lies in them, and nothing else.
//
//   document "safetensors_files" = {the index of a blob: the offset of its first tensor}
//
// Thread safety: pure but for the assembler that is given.
// Lifetime: refers to the step by index.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "core/state/assembler.h"
#include "formats/huggingface/shown_tensors.h"

namespace ckptfs::huggingface {

// Where the tensors of a file begin.
using SafetensorsFiles = std::map<BlobIndex, uint64_t>;

// `files`: safetensors whose every entry that is a parameter of the step has its name
// there, and whose __metadata__ says format 'pt', without which loaders refuse them.
void KeepSafetensorsFiles(Assembler& assembler, const SafetensorsFiles& files);

// Those that a step says may be shown.  kInvalid: the document is not of this form.
Result<SafetensorsFiles> SafetensorsFilesOf(const StepModel& step);

// The step's blobs have new numbers, by those that they had; kInvalid if a file has none.
Status RenumberSafetensorsFiles(StepModel& step, std::span<const std::optional<uint32_t>> numbers);

struct WholeFile {
  BlobIndex blob{};
  std::vector<size_t> tensors;  // into what is shown, by offset
};

// The files that hold the tensors and nothing else, by path; none if there is a tensor
// that is not in one of them as it is shown.  kInvalid: the document is not of this form.
Result<std::vector<WholeFile>> WholeFilesOf(const StepModel& step,
                                            const std::vector<ShownTensor>& tensors);

}  // namespace ckptfs::huggingface
