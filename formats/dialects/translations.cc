// SPDX-License-Identifier: Apache-2.0

#include "formats/dialects/translations.h"

#include "core/base/strings.h"
#include "core/state/model_config.h"
#include "formats/dialects/shipped.h"
#include "formats/families/shipped.h"
#include "formats/tools/config_text.h"
#include "formats/torch/source_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

constexpr std::string_view kQuantised =
    "its weights are quantised, and their scales have names of their own";

// States that are values of a document stay with a parameter's name.
Status CheckOtherStates(const StepModel& step, const StepModel& translated) {
  const Document* document = step.FindDocument(kSourceStates);
  if (document == nullptr) return {};
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(*document));
  for (const auto& [label, parameters] : RootOf(tree).Items()) {
    for (const auto& [name, kinds] : parameters.Items()) {
      if (!name.String() || translated.FindParameter(*name.String())) continue;
      return Fail(Error{ErrorCode::kUnsupported,
                        "the optimizer has a state of it that is neither a tensor of its shape nor "
                        "a number, which cannot follow it to other names"}
                      .OfParameter(*name.String()));
    }
  }
  return {};
}

}  // namespace

Translations::Translations(std::optional<ModelFiles> given, DialectTable hf5, FamilySet families)
    : given_(std::move(given)),
      hf5_(std::move(hf5)),
      families_(std::move(families)),
      kept_(kKeptBytes,
            [](const MadePtr& made) { return HeapBytesOf(*made->step) + HeapBytesOf(*made->of); }) {
}

Result<std::shared_ptr<Translations>> Translations::Make(std::optional<ModelFiles> given) {
  CKPT_ASSIGN_OR_RETURN(DialectTable hf5, ShippedDialect(Dialect::kHf5));
  CKPT_ASSIGN_OR_RETURN(FamilySet families, ShippedFamilies());
  return std::shared_ptr<Translations>(
      new Translations(std::move(given), std::move(hf5), std::move(families)));
}

// A config that says nothing of the kind counts as none.
Translations::Config Translations::ConfigOf(const StepModel& step) const {
  Config out;
  const auto own = ModelFilesOf(step);
  const std::string* config = own ? own->config() : nullptr;
  if (config == nullptr && given_) config = given_->config();
  if (config == nullptr) return out;
  if (const auto facts = ReadConfigFacts(*config)) {
    out.kind.model_type = facts->model_type;
    out.quantised = !facts->quantisation.empty();
  }
  if (const auto sizes = ParseModelConfig(*config)) {
    const auto experts = sizes->find("experts");
    if (experts != sizes->end()) out.kind.experts = static_cast<uint64_t>(experts->second);
  }
  return out;
}

FoundDialect Translations::Of(const std::shared_ptr<const StepModel>& step) {
  const auto known = said_.Find(step.get());
  // Another step may have had the address before.
  if (known && (*known)->of.lock() == step) return (*known)->recognised;
  const Config config = ConfigOf(*step);
  FoundDialect recognised{.why = std::string(kQuantised)};
  if (!config.quantised) recognised = FindDialect(*step, hf5_, Dialect::kHf5, config.kind);
  said_.Replace(step.get(), std::make_shared<const Said>(Said{step, recognised}));
  return recognised;
}

Result<std::shared_ptr<const StepModel>> Translations::To(
    const std::shared_ptr<const StepModel>& step, Dialect to, Carried carried) {
  const FoundDialect said = Of(step);
  if (said.same || said.dialect == to) return step;
  if (said.dialect == Dialect::kAsSource) {
    return Fail(ErrorCode::kUnsupported,
                StrCat("nothing proves how its tensors are named: ", said.why));
  }
  const auto make = [&]() -> Result<MadePtr> {
    CKPT_ASSIGN_OR_RETURN(auto made, Translate(step, hf5_, Dialect::kHf5, ConfigOf(*step).kind, to,
                                               families_, carried));
    if (carried == Carried::kAll) CKPT_RETURN_IF_ERROR(CheckOtherStates(*step, *made));
    return std::make_shared<const Made>(Made{step, std::move(made)});
  };
  CKPT_ASSIGN_OR_RETURN(const MadePtr made, kept_.Get(Key{step.get(), to, carried}, make));
  return made->step;
}

}  // namespace ckptfs
