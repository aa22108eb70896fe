// SPDX-License-Identifier: Apache-2.0
//
// EncodedFormat stands before another format and gives it a step of plain weights where the layout
// asks for a dtype and the source's weights are stored with scales per block.  Without a dtype the
// format has values and scales as they are stored, which ranks cut between blocks.
//
// Thread safety: all methods may be called concurrently.

#pragma once

#include <memory>
#include <string_view>

#include "core/view/view_format.h"
#include "formats/encodings/encodings.h"

namespace ckptfs {

class EncodedFormat : public ViewFormat {
 public:
  EncodedFormat(std::unique_ptr<ViewFormat> inner, std::shared_ptr<Encodings> encodings)
      : inner_(std::move(inner)), encodings_(std::move(encodings)) {}

  std::string_view name() const override { return inner_->name(); }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override;

 private:
  const std::unique_ptr<ViewFormat> inner_;
  const std::shared_ptr<Encodings> encodings_;
};

}  // namespace ckptfs
