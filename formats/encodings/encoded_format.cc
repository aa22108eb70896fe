// SPDX-License-Identifier: Apache-2.0

#include "formats/encodings/encoded_format.h"

#include <utility>

namespace ckptfs {

Result<std::shared_ptr<const View>> EncodedFormat::Open(
    std::shared_ptr<const ShownState> shown) const {
  const Layout& layout = shown->layout();
  if (!encodings_->ConfigOf(shown->step())) {
    const auto packed = layout.dtype ? encodings_->PackedTensorOf(shown->step()) : std::nullopt;
    if (!packed) return inner_->Open(std::move(shown));
    return Fail(Error{ErrorCode::kUnsupported,
                      "its elements are packed, and nothing says how they are decoded"}
                    .OfParameter(*packed)
                    .Needing("leave the dtype out of the layout"));
  }
  if (layout.dtype) {
    auto decoded = encodings_->To(shown->shared_step(), Encodings::Form::kDecoded);
    if (!decoded) return Fail(std::move(decoded).error().WithContext("decoding its weights"));
    return inner_->Open(ShownState::Of(*std::move(decoded), layout));
  }
  auto cut = encodings_->To(shown->shared_step(), Encodings::Form::kCut);
  auto view = inner_->Open(cut ? ShownState::Of(*std::move(cut), layout) : shown);
  if (view) return view;
  Layout plain = layout;
  plain.dtype = DType::kBF16;
  auto decoded = encodings_->To(shown->shared_step(), Encodings::Form::kDecoded);
  const bool helps = decoded && inner_->Open(ShownState::Of(*std::move(decoded), plain));
  if (!helps) return view;
  return Fail(std::move(view).error().Needing("add bf16 to the layout, which decodes its weights"));
}

}  // namespace ckptfs
