// SPDX-License-Identifier: Apache-2.0
//
// ResumeFormat shows a step as the directory from which the training tool
// that saved it resumes, by path.  It shows the tool's own files as they are,
// and, in the place of what DeepSpeed or FSDP saved, the same for the layout.
// The tools (transformers 5.23, accelerate 1.15, Lightning 2.6) open:
//
//   trainer/      Trainer.train(resume_from_checkpoint=...): trainer_state.json,
//                 scheduler.pt, rng_state*.pth, scaler.pt; with DeepSpeed the engine
//                 loads the directory's latest_universal, and global_step* must be there;
//                 with FSDP pytorch_model_fsdp_0/ and optimizer_0/, directories of DCP's;
//                 else model.safetensors and optimizer.pt
//   accelerate/   Accelerator.load_state(...): random_states_N.pkl, scheduler.bin,
//                 custom_checkpoint_N.pkl; with DeepSpeed the tag pytorch_model, with FSDP
//                 the two directories, else model.safetensors and optimizer.bin
//   lightning/    Trainer.fit(ckpt_path=...): DeepSpeedStrategy's directory, whose tag
//                 is checkpoint; FSDPStrategy's and ModelParallelStrategy's, which is one of
//                 DCP's with a meta.pt
//
// The framework that saved the step decides what is there: FSDP's directories for a step of
// FSDP's, and for others with the layout token `accelerate`; whole tensors for a step that
// had them, and for one of DeepSpeed's where it is certain whose the states are
// (formats/resume/plain_optimizer.h).
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "core/view/view_format.h"
#include "formats/tools/step_tree.h"

namespace ckptfs {

class ResumeFormat : public ViewFormat {
 public:
  // REQUIRES: `tool` is not kNone.
  explicit ResumeFormat(StepTool tool) : tool_(tool) {}

  std::string_view name() const override;
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const StepTool tool_;
};

// The files of a step that a tool wrote which the view shows as they are; none of other steps.
std::vector<BlobIndex> FilesShownToTool(const StepModel& step);

}  // namespace ckptfs
