// SPDX-License-Identifier: Apache-2.0

#include "formats/encodings/encodings.h"

#include <utility>

#include "core/base/strings.h"
#include "core/dialect/translate.h"
#include "core/encoding/decoded_step.h"
#include "core/encoding/encoded_patterns.h"
#include "core/encoding/packed_tensor.h"
#include "core/state/model_config.h"
#include "formats/families/shipped.h"
#include "formats/tools/config_text.h"

namespace ckptfs {
namespace {

// The most rows or columns of a block that a config may say.
constexpr uint64_t kMostOfBlock = uint64_t{1} << 20;

// The sizes that families ask for: the step's own, then the config's.
FamilyVariables SizesOf(const StepModel& step, const std::string& config) {
  FamilyVariables sizes = step.family_sizes;
  if (const auto said = ParseModelConfig(config)) sizes.insert(said->begin(), said->end());
  return sizes;
}

// The step's model files say that its weights are plain ones.
Status SetPlainConfig(const ModelFiles& files, StepModel& step) {
  std::string config = WithoutQuantisation(*files.config());
  const auto facts = ReadConfigFacts(config);
  if (!facts || !facts->quantisation.empty()) {
    return Fail(ErrorCode::kUnsupported,
                "its config.json says how weights are packed in words that cannot be taken out");
  }
  step.facts.model_files = files;
  for (ModelFile& file : step.facts.model_files.files) {
    if (file.name != kModelConfig) continue;
    file.body = std::make_shared<const std::string>(std::move(config));
    break;
  }
  step.facts.config_made = false;  // none that is given counts more
  return {};
}

}  // namespace

Encodings::Encodings(std::optional<ModelFiles> given, FamilySet families)
    : given_(std::move(given)),
      families_(std::move(families)),
      kept_(kKeptBytes,
            [](const MadePtr& made) { return HeapBytesOf(*made->step) + HeapBytesOf(*made->of); }) {
}

Result<std::shared_ptr<Encodings>> Encodings::Make(std::optional<ModelFiles> given) {
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  return std::shared_ptr<Encodings>(new Encodings(std::move(given), std::move(families)));
}

std::optional<EncodingConfig> Encodings::ConfigOf(const StepModel& step) const {
  const std::string* config = ChosenModelFiles(step.facts, given_).config();
  if (config == nullptr) return std::nullopt;
  const auto facts = ReadConfigFacts(*config);
  if (!facts) return std::nullopt;
  if (facts->quantisation == "mxfp4") return EncodingConfig{EncodingMethod::kMxfp4, kMxfp4Block};
  const auto [rows, columns] = facts->quantised_block;
  if (facts->quantisation != "fp8" || rows == 0 || columns == 0 || rows > kMostOfBlock ||
      columns > kMostOfBlock) {
    return std::nullopt;
  }
  return EncodingConfig{EncodingMethod::kFp8, {rows, columns}};
}

std::optional<std::string_view> Encodings::PackedTensorOf(const StepModel& step) const {
  const std::string* config = ChosenModelFiles(step.facts, given_).config();
  const auto facts = config == nullptr ? std::nullopt : std::optional(ReadConfigFacts(*config));
  const bool said = facts && *facts && !(*facts)->quantisation.empty();
  return said ? FindNarrowTensor(step) : FindPackedTensor(step);
}

Result<Encodings::MadePtr> Encodings::MakeForm(const std::shared_ptr<const StepModel>& step,
                                               Form form) const {
  const auto config = ConfigOf(*step);
  CKPT_CHECK(config.has_value());
  const ModelFiles& files = ChosenModelFiles(step->facts, given_);
  const FamilyVariables sizes = SizesOf(*step, *files.config());
  if (form == Form::kCut) {
    CKPT_ASSIGN_OR_RETURN(StepModel cut, CutBetweenBlocks(*step, *config, sizes, families_));
    return std::make_shared<const Made>(
        Made{step, std::make_shared<const StepModel>(std::move(cut))});
  }
  CKPT_ASSIGN_OR_RETURN(StepModel decoded, Decode(*step, *config, sizes, families_));
  CKPT_RETURN_IF_ERROR(SetPlainConfig(files, decoded));
  return std::make_shared<const Made>(
      Made{step, std::make_shared<const StepModel>(std::move(decoded))});
}

Result<std::shared_ptr<const StepModel>> Encodings::To(const std::shared_ptr<const StepModel>& step,
                                                       Form form) {
  CKPT_ASSIGN_OR_RETURN(const MadePtr made,
                        kept_.Get(Key{step.get(), form}, [&] { return MakeForm(step, form); }));
  return made->step;
}

}  // namespace ckptfs
