// SPDX-License-Identifier: Apache-2.0
//
// TranslatedFormat stands before another format and gives it the step in the dialect that the
// layout asks for, or that the files' readers know.  The format then shows an ordinary step.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <string_view>

#include "core/view/view_format.h"
#include "formats/dialects/translations.h"

namespace ckptfs {

class TranslatedFormat : public ViewFormat {
 public:
  // `own`: the dialect of the files' readers, whatever the layout says, who take weights alone;
  // kAsSource: the layout's.
  TranslatedFormat(std::unique_ptr<ViewFormat> inner, std::shared_ptr<Translations> translations,
                   Dialect own = Dialect::kAsSource)
      : inner_(std::move(inner)), translations_(std::move(translations)), own_(own) {}

  std::string_view name() const override { return inner_->name(); }
  // Where the layout asks for no dialect and nothing proves which one the step is in, names stay
  // what they are; unless some are those of a dialect that files never have.
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const std::unique_ptr<ViewFormat> inner_;
  const std::shared_ptr<Translations> translations_;
  const Dialect own_;
};

}  // namespace ckptfs
