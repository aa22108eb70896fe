// SPDX-License-Identifier: Apache-2.0

#include "formats/compact_hooks.h"

#include <set>
#include <string>

#include "formats/huggingface/whole_files.h"
#include "formats/resume/resume_view.h"
#include "formats/tools/model_files.h"
#include "formats/tools/source_traits.h"
#include "formats/tools/tool_files.h"

namespace ckptfs {
namespace {

Result<std::vector<uint8_t>> ShownWhole(const StepModel& step) {
  // Which of a model's own files hold its weights, and how they are called, decides how they load.
  std::vector<uint8_t> shown(step.blobs.size(), TraitsOf(step).pretrained ? 1 : 0);
  const auto show = [&](BlobIndex blob) { shown[static_cast<uint32_t>(blob)] = 1; };
  CKPT_ASSIGN_OR_RETURN(const auto whole, huggingface::SafetensorsFilesOf(step));
  for (const auto& [blob, offset] : whole) show(blob);
  CKPT_ASSIGN_OR_RETURN(const auto for_tool, FilesShownToTool(step));
  for (const BlobIndex blob : for_tool) show(blob);
  CKPT_ASSIGN_OR_RETURN(const ModelFiles models, ModelFilesOf(step));
  for (const ModelFile& file : models.files) {
    if (const auto* blob = std::get_if<BlobIndex>(&file.body)) show(*blob);
  }
  return shown;
}

Status Renumber(StepModel& now, const StepModel& before, const BlobNumbers& numbers) {
  CKPT_RETURN_IF_ERROR(huggingface::RenumberSafetensorsFiles(now, numbers));
  CKPT_RETURN_IF_ERROR(RenumberModelFiles(now, numbers));
  CKPT_ASSIGN_OR_RETURN(const auto tool, ToolFilesOf(before));
  std::set<std::string> packed;
  if (tool) {
    for (const auto& [path, blob] : tool->files) {
      if (!numbers[static_cast<uint32_t>(blob)]) packed.insert(path);
    }
  }
  return NotePackedFiles(now, packed);
}

}  // namespace

CompactHooks MakeCompactHooks() { return {ShownWhole, Renumber}; }

}  // namespace ckptfs
