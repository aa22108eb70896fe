// SPDX-License-Identifier: Apache-2.0

#include "formats/compact_hooks.h"

#include <variant>

#include "formats/resume/resume_view.h"
#include "formats/tools/source_traits.h"

namespace ckptfs {

std::vector<uint8_t> FilesShownWhole(const StepModel& step) {
  // Loaders ask which of a model's own files hold its weights, and how they are called.
  std::vector<uint8_t> shown(step.blobs.size(), TraitsOf(step).pretrained ? 1 : 0);
  const auto show = [&](BlobIndex blob) { shown[static_cast<uint32_t>(blob)] = 1; };
  for (const auto& [blob, offset] : step.facts.safetensors) show(blob);
  for (const BlobIndex blob : FilesShownToTool(step)) show(blob);
  for (const ModelFile& file : step.facts.model_files.files) {
    if (const auto* blob = std::get_if<BlobIndex>(&file.body)) show(*blob);
  }
  return shown;
}

}  // namespace ckptfs
