// SPDX-License-Identifier: Apache-2.0

#include "formats/dialects/translated_format.h"

#include "core/base/strings.h"

namespace ckptfs {

Result<std::shared_ptr<const View>> TranslatedFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  const Dialect asked = shown->layout().dialect;
  const Dialect to = own_ != Dialect::kAsSource ? own_ : asked;
  if (to == Dialect::kAsSource) return inner_->Open(std::move(shown));
  if (asked == Dialect::kAsSource) {
    const FoundDialect found = translations_->Of(shown->shared_step());
    const bool unknown = found.dialect == Dialect::kAsSource && !found.foreign;
    if (unknown) return inner_->Open(std::move(shown));
  }
  const Carried carried = own_ != Dialect::kAsSource ? Carried::kWeights : Carried::kAll;
  auto step = translations_->To(shown->shared_step(), to, carried);
  if (!step) {
    return Fail(std::move(step).error().WithContext(StrCat("names '", DialectToken(to), "'")));
  }
  if (*step == shown->shared_step()) return inner_->Open(std::move(shown));
  if (shown->layout().keys == StateKeys::kNumbered && carried == Carried::kAll) {
    return Fail(
        Error{ErrorCode::kUnsupported,
              "an optimizer's numbers of parameters are only known under the source's names"}
            .Needing("leave 'numbered' or the dialect out of the layout"));
  }
  return inner_->Open(ShownState::Of(*std::move(step), shown->layout()));
}

}  // namespace ckptfs
