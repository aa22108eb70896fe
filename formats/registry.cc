// SPDX-License-Identifier: Apache-2.0

#include "formats/registry.h"

#include <utility>

#include "formats/dcp/source.h"
#include "formats/dcp/view.h"
#include "formats/deepspeed/source.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/deepspeed/universal_source.h"
#include "formats/huggingface/source.h"
#include "formats/huggingface/view.h"
#include "formats/rank/rank_view.h"
#include "formats/resume/resume_view.h"

namespace ckptfs {

std::vector<std::unique_ptr<Source>> MakeSources() {
  std::vector<std::unique_ptr<Source>> sources;
  sources.push_back(MakeDeepSpeedSource());
  sources.push_back(MakeDeepSpeedUniversalSource());
  sources.push_back(MakeDcpSource());
  sources.push_back(MakeHuggingFaceSource());
  return sources;
}

std::vector<std::unique_ptr<ViewFormat>> MakeViewFormats(std::optional<ModelFiles> models) {
  std::vector<std::unique_ptr<ViewFormat>> formats;
  formats.push_back(std::make_unique<RankFormat>());
  formats.push_back(std::make_unique<deepspeed::UniversalFormat>());
  formats.push_back(std::make_unique<HuggingFaceFormat>(std::move(models)));
  for (const StepTool tool : {StepTool::kTrainer, StepTool::kAccelerate, StepTool::kLightning}) {
    formats.push_back(std::make_unique<ResumeFormat>(tool));
  }
  formats.push_back(std::make_unique<DcpFormat>());
  return formats;
}

}  // namespace ckptfs
