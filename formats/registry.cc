// SPDX-License-Identifier: Apache-2.0

#include "formats/registry.h"

#include <utility>

#include "formats/dcp/source.h"
#include "formats/dcp/view.h"
#include "formats/deepspeed/native_view/native_view.h"
#include "formats/deepspeed/source.h"
#include "formats/deepspeed/universal/universal_view.h"
#include "formats/deepspeed/universal_source.h"
#include "formats/dialects/translated_format.h"
#include "formats/encodings/encoded_format.h"
#include "formats/huggingface/source.h"
#include "formats/huggingface/view.h"
#include "formats/megatron/fsdp/form.h"
#include "formats/megatron/legacy/source.h"
#include "formats/megatron/legacy/view.h"
#include "formats/megatron/source.h"
#include "formats/megatron/view.h"
#include "formats/rank/rank_view.h"
#include "formats/rank_shards/source.h"
#include "formats/resume/resume_view.h"

namespace ckptfs {

std::vector<std::unique_ptr<Source>> MakeSources() {
  std::vector<std::unique_ptr<Source>> sources;
  sources.push_back(MakeDeepSpeedSource());
  sources.push_back(MakeDeepSpeedUniversalSource());
  sources.push_back(MakeMegatronSource());
  sources.push_back(MakeMegatronLegacySource());
  sources.push_back(MakeDcpSource({megatron::FsdpForm()}));
  sources.push_back(MakeRankShardsSource());
  sources.push_back(MakeHuggingFaceSource());
  return sources;
}

std::vector<std::unique_ptr<ViewFormat>> MakeViewFormats(std::optional<ModelFiles> models) {
  std::vector<std::unique_ptr<ViewFormat>> formats;
  auto translations = Translations::Make(models);
  CKPT_CHECK(translations.has_value());  // tables and families of this build
  auto encodings = Encodings::Make(models);
  CKPT_CHECK(encodings.has_value());
  const auto decoded = [&](std::unique_ptr<ViewFormat> format) {
    formats.push_back(std::make_unique<EncodedFormat>(std::move(format), *encodings));
  };
  const auto add = [&](std::unique_ptr<ViewFormat> format, Dialect own = Dialect::kAsSource) {
    decoded(std::make_unique<TranslatedFormat>(std::move(format), *translations, own));
  };
  add(std::make_unique<RankFormat>());
  add(std::make_unique<deepspeed::UniversalFormat>());
  formats.push_back(std::make_unique<deepspeed::NativeFormat>());
  add(std::make_unique<HuggingFaceFormat>(models), Dialect::kHf);
  for (const StepTool tool : {StepTool::kTrainer, StepTool::kAccelerate, StepTool::kLightning}) {
    add(std::make_unique<ResumeFormat>(tool));
  }
  add(std::make_unique<DcpFormat>());
  decoded(std::make_unique<MegatronFormat>(*translations, models));
  decoded(std::make_unique<MegatronLegacyFormat>(*translations, std::move(models)));
  return formats;
}

}  // namespace ckptfs
